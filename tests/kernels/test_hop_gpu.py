"""The kernels against the reference, and what happens when a side is wrong, late or dead. Needs a GPU, better two."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from afdpatch.kernels import HopBuffers, HopCode, HopError, reference
from afdpatch.kernels.layout import Geometry, LayoutError

from .pairs import DEVICES, GPUS, MARKS, answer, make, noise, same, wait

pytestmark = MARKS


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
@pytest.mark.parametrize("seed", range(12))
def test_a_slot_after_a_send_and_the_rows_of_a_receive_are_the_references(limit: int, seed: int) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    geometry = Geometry(
        max_rows=pick.randint(1, 300),
        hidden=16 * pick.randint(1, 200),
        dtype=pick.choice(["bfloat16", "float16", "float32", "uint8"]),
        slots=3,
        packed_limit=limit,
        packed_blocks=pick.choice([1, 7, 64, 128]),
        packed_workers=pick.choice([32, 256, 992]),
        packed_ungated=pick.choice([0, 128]),
        bulk_blocks=pick.choice([1, 5, 128]),
        bulk_threads=pick.choice([32, 512, 1024]),
    )
    first, second = make(geometry, overlap=bool(seed % 2))
    counts = [0, 0, 0]
    for _ in range(12):
        slot = pick.randrange(3)
        rows, layer = pick.randint(1, geometry.max_rows), pick.randrange(100)
        counts[slot] += 1
        for sender, receiver, device in ((first, second, DEVICES[0]), (second, first, DEVICES[1])):
            sent = noise(rows, geometry, device)
            expected = receiver.slot(slot).cpu()
            sender.send(sent, layer, slot)
            wait()
            found = receiver.slot(slot).cpu()
            reference.write(expected, geometry, sent.cpu(), counts[slot], layer, slot)
            assert torch.equal(found, expected)
            out = torch.full_like(sent, 0, device=receiver.device) if pick.random() < 0.5 else None
            with torch.cuda.device(receiver.device):
                got = receiver.receive(rows, layer, slot, out)
            wait()
            assert same(got, sent)
            assert same(got, reference.read(found, geometry, rows, counts[slot], layer, slot))
            flags = receiver.slot(slot).cpu()
            if not geometry.spread(rows).packed or out is not None:
                assert torch.equal(flags, found)  # every flag is reset, nothing else has changed
            assert first.status().code == second.status().code == HopCode.OK
    first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
@pytest.mark.parametrize("copied", [False, True])
def test_an_exchange_sends_and_finds_what_the_reference_wrote(limit: int, copied: bool) -> None:
    geometry = Geometry(70, 1040, slots=2, packed_limit=limit)
    first, second = make(geometry)
    for number, rows in enumerate((1, 70, 13, 64), start=1):
        sent, reply = noise(rows, geometry, DEVICES[0]), noise(rows, geometry, "cpu")
        expected = second.slot(1).cpu()
        reference.write(expected, geometry, sent.cpu(), number, 9, 1)
        got = first.exchange(sent, 9, 1, torch.zeros_like(sent) if copied else None)
        answer((first, second), geometry, reply, number, 9, 1)
        wait()
        assert first.status().code == HopCode.OK and same(got, reply)
        assert torch.equal(second.slot(1).cpu(), expected)
    first.close(), second.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("rows", [1, 32, 33, 200])
def test_replayed_graphs_bring_new_rows_each_time(streams, rows: int, launches: int, overlap: bool) -> None:
    geometry = Geometry(200, 512, slots=2, packed_limit=32 * 1024)
    first, second = make(geometry, overlap=overlap)
    layers = 6
    inputs = torch.zeros(2, layers, rows, 512, dtype=torch.bfloat16, device=DEVICES[0])
    outputs = torch.zeros_like(inputs)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.device(DEVICES[0]), torch.cuda.graph(graphs[0], stream=streams[0]):
        for layer, slot in itertools.product(range(layers), range(2)):
            if launches == 1:
                first.exchange(inputs[slot, layer], layer, slot, outputs[slot, layer])
            else:
                first.send(inputs[slot, layer], layer, slot)
                outputs[slot, layer] = first.receive(rows, layer, slot)
    with torch.cuda.device(DEVICES[1]), torch.cuda.graph(graphs[1], stream=streams[1]):
        for layer, slot in itertools.product(range(layers), range(2)):
            second.send(second.receive(rows, layer, slot) * 2 + layer, layer, slot)
    for _ in range(20):
        inputs.normal_()
        outputs.fill_(float("nan"))
        wait()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        wait()
        assert first.status().code == second.status().code == HopCode.OK
        add = torch.arange(layers, device=DEVICES[0]).view(1, -1, 1, 1)
        assert torch.equal(outputs, (inputs * 2 + add.bfloat16()))
    first.close(), second.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 32, 33, 200])
def test_what_lies_in_a_slot_can_be_sent_from_there(streams, rows: int, overlap: bool) -> None:
    """No kernel of others between, and each side reads where the other has just written: stale caches would show."""
    geometry = Geometry(200, 512, packed_limit=32 * 1024)
    first, second = make(geometry, overlap=overlap)
    layers = 30
    inputs = torch.zeros(layers, rows, 512, dtype=torch.bfloat16, device=DEVICES[0])
    outputs = torch.zeros_like(inputs)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.device(DEVICES[0]), torch.cuda.graph(graphs[0], stream=streams[0]):
        for layer in range(layers):
            first.exchange(first.exchange(inputs[layer], layer), layer, out=outputs[layer])
    with torch.cuda.device(DEVICES[1]), torch.cuda.graph(graphs[1], stream=streams[1]):
        for layer in range(2 * layers):
            second.send(second.receive(rows, layer // 2), layer // 2)
    for _ in range(200):
        inputs.normal_()
        outputs.fill_(float("nan"))
        wait()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        wait()
        assert first.status().code == second.status().code == HopCode.OK
        assert torch.equal(outputs, inputs)
    first.close(), second.close()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: on one, a stream's wait can hold up the others' launches")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
def test_micro_batches_go_their_own_way_in_streams_of_their_own(limit: int, overlap: bool) -> None:
    geometry = Geometry(64, 2048, slots=3, packed_limit=limit)
    first, second = make(geometry, overlap=overlap)
    lanes = [(torch.cuda.Stream(DEVICES[0]), torch.cuda.Stream(DEVICES[1])) for _ in range(3)]
    inputs = [torch.randn(60, rows, 2048, device=DEVICES[0]).bfloat16() for rows in (64, 17, 1)]
    outputs = [torch.zeros_like(part) for part in inputs]
    wait()
    for layer in range(60):
        for slot, (ours, theirs) in enumerate(lanes):
            with torch.cuda.stream(ours):
                first.exchange(inputs[slot][layer], layer, slot, outputs[slot][layer])
            with torch.cuda.stream(theirs):
                second.send(second.receive(inputs[slot].shape[1], layer, slot) * 2, layer, slot)
    wait()
    assert first.status().code == second.status().code == HopCode.OK
    for part, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out, part * 2)
    first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
def test_rows_of_two_attention_ranks_come_together_in_one_batch(limit: int) -> None:
    geometry = Geometry(64, 256, packed_limit=limit)
    pairs = [make(geometry), make(geometry)]
    batch = torch.zeros(50, 256, dtype=torch.bfloat16, device=DEVICES[1])
    parts = [noise(20, geometry, DEVICES[0]), noise(30, geometry, DEVICES[0])]
    for (attention, ffn), part, out in zip(pairs, parts, batch.split([20, 30]), strict=True):
        attention.send(part, 3)
        ffn.receive(part.shape[0], 3, out=out)
    wait()
    assert same(batch, torch.cat(parts))
    for first, second in pairs:
        first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
def test_a_message_of_another_hop_is_an_error_and_what_follows_ends_at_once(limit: int) -> None:
    geometry = Geometry(8, 256, packed_limit=limit)
    sent = noise(4, geometry, DEVICES[0])

    def after(layer: int, rows: int, skip: int = 0) -> tuple[HopBuffers, HopBuffers]:
        first, second = make(geometry)
        if skip:  # the sender has counted further than the receiver
            first._state[32:34] = skip
        first.send(sent, 1)
        second.receive(rows, layer)
        wait()
        return first, second

    for arguments, code, expected, found in (
        ((2, 4), HopCode.PLACE, 2 << 16, 1 << 16),
        ((1, 3), HopCode.ROWS, 3, 4),
        ((1, 4, 7), HopCode.SEQUENCE, 1, 8),
    ):
        first, second = after(*arguments)
        status = second.status()
        assert (status.code, status.expected, status.found) == (code, expected, found), str(status)
        started = time.monotonic()
        for layer in range(100):
            second.send(noise(4, geometry, DEVICES[1]), layer)
            second.receive(4, layer)
        wait()
        assert time.monotonic() - started < 1 and second.status() == status
        assert not first.slot().count_nonzero()  # nothing was sent after the error
        for side in (first, second):
            side.reset()
        first.send(sent, 1)
        assert same(second.receive(4, 1), sent) and second.status().code == HopCode.OK
        first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
def test_sending_twice_and_answering_nothing_are_errors(limit: int) -> None:
    geometry = Geometry(8, 256, packed_limit=limit)
    for wrong in ("twice", "answer"):
        first, second = make(geometry, deadline_s=0.2)
        if wrong == "twice":
            first.send(noise(4, geometry, DEVICES[0]), 0)
            first.send(noise(4, geometry, DEVICES[0]), 1)
        else:
            second.send(noise(4, geometry, DEVICES[1]), 0)
        wait()
        assert (first if wrong == "twice" else second).status().code == HopCode.TURN
        first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
def test_a_wait_ends_at_its_deadline_and_by_abort(limit: int) -> None:
    geometry = Geometry(8, 256, packed_limit=limit)
    first, second = make(geometry, deadline_s=0.5)
    started = time.monotonic()
    for layer in range(50):
        first.exchange(noise(4, geometry, DEVICES[0]), layer)
    wait()
    assert 0.4 < time.monotonic() - started < 1.0
    status = first.status()
    assert (status.code, status.layer, status.expected) == (HopCode.DEADLINE, 0, 1)
    first.close(), second.close()
    first, second = make(geometry, deadline_s=30)
    threading.Timer(0.3, second.abort).start()
    started = time.monotonic()
    second.receive(4, 5)
    wait()
    assert 0.2 < time.monotonic() - started < 1.0
    assert (second.status().code, second.status().layer) == (HopCode.ABORTED, 5)
    first.close(), second.close()


def test_wrong_use_is_refused_before_the_launch() -> None:
    geometry = Geometry(8, 256)
    rows = noise(4, geometry, DEVICES[0])
    alone = HopBuffers.create(8, 256, "bfloat16", 1, DEVICES[0], initiator=True)
    with pytest.raises(HopError, match="call open or connect first"):
        alone.send(rows, 0)
    first, second = make(geometry)
    with pytest.raises(HopError, match="an open peer"):
        first.connect(alone)
    with pytest.raises(HopError, match="use receive and send"):
        second.exchange(rows, 0)
    for tensor in (rows.float(), rows.cpu(), rows[:, :128], rows.t(), rows.flatten()[1:257].view(1, 256)):
        with pytest.raises(HopError, match=r"hop: expected \["):
            first.send(tensor, 0)
    with pytest.raises(LayoutError, match="micro_batch: expected 0 to 0, found 1; make more slots"):
        first.send(rows, 0, 1)
    with pytest.raises(LayoutError, match="rows: expected 1 to 8, found 9"):
        first.send(noise(9, geometry, DEVICES[0]), 0)
    with pytest.raises(HopError, match="expected a CUDA device with its index"):
        HopBuffers.create(8, 256, "bfloat16", 1, "cpu", initiator=True)
    first.close(), second.close(), alone.close()
    first.close()


# Two processes


def ffn_process(pipe: Connection, geometry: Geometry, graph: bool) -> None:
    """Answers with twice the rows, layer after layer, until the pipe closes."""
    torch.cuda.set_device(DEVICES[1])
    buffers = HopBuffers.create(0, 0, "", 0, DEVICES[1], initiator=False, deadline_s=20, geometry=geometry)
    pipe.send_bytes(buffers.handle())
    buffers.open(pipe.recv_bytes())
    replay = torch.cuda.CUDAGraph()

    def step() -> None:
        for layer in range(10):
            buffers.send(buffers.receive(8, layer) * 2, layer)

    if graph:
        with torch.cuda.graph(replay):
            step()
    pipe.send_bytes(b"ready")
    try:
        while pipe.recv_bytes():
            replay.replay() if graph else step()
    except EOFError:
        torch.cuda.synchronize()
        assert buffers.status().code == HopCode.OK
        buffers.close()


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_between_processes_and_when_the_peer_is_killed(graph: bool, limit: int) -> None:
    geometry = Geometry(64, 2048, packed_limit=limit)
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=ffn_process, args=(theirs, geometry, graph), daemon=True)
    process.start()
    theirs.close()
    deadline_s = 2.0 if GPUS > 1 else 5.0
    buffers = HopBuffers.create(0, 0, "", 0, DEVICES[0], initiator=True, deadline_s=deadline_s, geometry=geometry)
    try:
        buffers.open(pipe.recv_bytes())
        pipe.send_bytes(buffers.handle())
        sent = torch.randn(8, 2048, device=DEVICES[0]).bfloat16()
        out = torch.empty(10, 8, 2048, device=DEVICES[0], dtype=torch.bfloat16)
        replay = torch.cuda.CUDAGraph()

        def step() -> None:
            for layer in range(10):
                buffers.exchange(sent, layer, out=out[layer])

        if graph:
            with torch.cuda.graph(replay):
                step()
        assert pipe.recv_bytes() == b"ready"
        for _ in range(3):
            out.fill_(float("nan"))
            pipe.send_bytes(b"step")
            replay.replay() if graph else step()
            torch.cuda.synchronize(DEVICES[0])
            assert buffers.status().code == HopCode.OK
            assert torch.equal(out, (sent * 2).expand_as(out))
        # Steps go on while the peer is killed.
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        started = time.monotonic()
        while buffers.status().code == HopCode.OK and time.monotonic() - started < 30:
            with contextlib.suppress(OSError):  # it is dead: the step finds out by itself
                pipe.send_bytes(b"step")
            replay.replay() if graph else step()
            torch.cuda.synchronize(DEVICES[0])
        taken = time.monotonic() - started
        print(f"killed after 0.3 s, deadline {deadline_s} s, over after {taken:.3f} s: {buffers.status()}")
        assert buffers.status().code == HopCode.DEADLINE
        assert taken < 0.3 + deadline_s + 1.0
        # The survivor's GPU and context are as good as before.
        assert torch.equal(sent + sent, sent * 2)
    finally:
        process.kill()
        process.join()
        pipe.close()
        buffers.close()
