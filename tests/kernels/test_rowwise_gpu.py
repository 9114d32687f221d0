"""Quantised rows and the fused norm against the reference. Needs a GPU, better two."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch

from afdpatch.kernels import HopBuffers, HopCode, HopError, reference
from afdpatch.kernels.layout import Geometry, LayoutError

from .pairs import DEVICES, GPUS, MARKS, answer, make, noise, same, wait

pytestmark = MARKS
WIRE = "float8_e4m3fn"
DTYPES = ["bfloat16", "float16", "float32"]
LIMITS = pytest.mark.parametrize("limit", [0, 1 << 20], ids=["bulk", "packed"])


def some_rows(pick: random.Random, rows: int, geometry: Geometry, device: str) -> torch.Tensor:
    """Numbers of all sizes, a group of zeros, or any bits, with NaNs and infinities."""
    if pick.random() < 0.3:
        return noise(rows, geometry, device)
    numbers = torch.randn(rows, geometry.hidden, device=device) * 2.0 ** pick.randint(-20, 8)
    numbers *= torch.exp2(torch.randint(-8, 4, numbers.shape, device=device))
    numbers[pick.randrange(rows), :128] = 0
    return numbers.to(getattr(torch, geometry.dtype))


def through_the_wire(rows: torch.Tensor) -> torch.Tensor:
    """What comes out of [..., hidden] rows that were quantised, on the CPU."""
    flat = rows.cpu().reshape(-1, rows.shape[-1])
    return reference.dequantise(reference.quantise(flat), flat.shape[1], flat.dtype).view(rows.shape)


def steps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The most steps of their dtype (16 bits) that lie between two tensors."""
    places = []
    for tensor in (a, b):
        bits = tensor.cpu().contiguous().view(torch.int16).int()
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return int((places[0] - places[1]).abs().max())


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the bound that `reference.norm` states."""
    if found.dtype == torch.float32:
        return torch.allclose(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-30)
    return bool(found.isfinite().all()) and steps(found, expected) <= 2


# Quantised


@LIMITS
@pytest.mark.parametrize("seed", range(12))
def test_a_quantised_slot_after_a_send_and_the_rows_of_a_receive_are_the_references(limit: int, seed: int) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    geometry = Geometry(
        max_rows=pick.randint(1, 200),
        hidden=16 * pick.choice([1, 8, 9, 32, 33, 128, pick.randint(1, 200)]),
        dtype=DTYPES[seed % 3],
        slots=2,
        packed_limit=limit,
        packed_blocks=pick.choice([1, 7, 64, 128]),
        packed_workers=pick.choice([32, 256, 992]),
        packed_ungated=pick.choice([0, 128]),
        wire=WIRE,
        wire_blocks=pick.choice([1, 5, 128]),
        wire_threads=pick.choice([32, 512, 1024]),
    )
    first, second = make(geometry, overlap=bool(seed % 2))
    counts = [0, 0]
    for _ in range(8):
        slot = pick.randrange(2)
        rows, layer = pick.choice([1, geometry.max_rows, pick.randint(1, geometry.max_rows)]), pick.randrange(100)
        counts[slot] += 1
        for sender, receiver, device in ((first, second, DEVICES[0]), (second, first, DEVICES[1])):
            sent = some_rows(pick, rows, geometry, device)
            expected = receiver.slot(slot).cpu()
            sender.send(sent, layer, slot)
            wait()
            found = receiver.slot(slot).cpu()
            start = sender is first
            reference.write(expected, geometry, sent.cpu(), counts[slot], layer, slot, initiator=start)
            assert torch.equal(found, expected)
            out = torch.full_like(sent, 0, device=receiver.device) if pick.random() < 0.5 else None
            with torch.cuda.device(receiver.device):
                got = receiver.receive(rows, layer, slot, out)
            wait()
            assert first.status().code == second.status().code == HopCode.OK
            assert same(got, through_the_wire(sent) if start else sent)
            assert same(got, reference.read(found, geometry, rows, counts[slot], layer, slot, initiator=start))
            after = receiver.slot(slot).cpu()  # every flag is reset, nothing else has changed
            if out is None:
                found[geometry.payload_at : geometry.wire_at] = after[geometry.payload_at : geometry.wire_at]
            assert torch.equal(after, found)
    first.close(), second.close()


@pytest.mark.parametrize("limit", [0, 100_000, 1 << 20], ids=["bulk", "mixed", "packed"])
@pytest.mark.parametrize("copied", [False, True])
def test_an_exchange_of_quantised_rows_finds_what_the_reference_wrote(limit: int, copied: bool) -> None:
    geometry = Geometry(70, 1040, slots=2, packed_limit=limit, wire=WIRE)
    first, second = make(geometry)
    for number, rows in enumerate((1, 70, 13, 64), start=1):
        sent, reply = torch.randn(rows, 1040, device=DEVICES[0]).bfloat16(), noise(rows, geometry, "cpu")
        expected = second.slot(1).cpu()
        reference.write(expected, geometry, sent.cpu(), number, 9, 1)
        got = first.exchange(sent, 9, 1, torch.zeros_like(sent) if copied else None)
        answer((first, second), geometry, reply, number, 9, 1)
        wait()
        assert first.status().code == HopCode.OK and same(got, reply)
        assert torch.equal(second.slot(1).cpu(), expected)
    first.close(), second.close()


@LIMITS
def test_quantised_rows_of_two_attention_ranks_come_together_in_one_batch(limit: int) -> None:
    geometry = Geometry(64, 272, packed_limit=limit, wire=WIRE)
    pairs = [make(geometry), make(geometry)]
    batch = torch.full((52, 272), 7, dtype=torch.bfloat16, device=DEVICES[1])
    parts = [torch.randn(rows, 272, device=DEVICES[0]).bfloat16() for rows in (20, 30)]
    for (attention, ffn), part, out in zip(pairs, parts, batch[1:51].split([20, 30]), strict=True):
        attention.send(part, 3)
        ffn.receive(part.shape[0], 3, out=out)
    wait()
    assert same(batch[1:51], through_the_wire(torch.cat(parts)))
    assert bool((batch[[0, 51]] == 7).all())
    for first, second in pairs:
        first.close(), second.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("rows", [1, 32, 33, 48, 200])
def test_replayed_graphs_quantise_new_rows_each_time(streams, rows: int, launches: int, overlap: bool) -> None:
    # Packed both ways, packed one way (33 and 48 rows), and in bulk.
    geometry = Geometry(200, 512, slots=2, packed_limit=32 * 1024, wire=WIRE)
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
    add = torch.arange(layers).view(1, -1, 1, 1).bfloat16()
    for _ in range(10):
        inputs.normal_()
        outputs.fill_(float("nan"))
        wait()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        wait()
        assert first.status().code == second.status().code == HopCode.OK
        assert torch.equal(outputs.cpu(), through_the_wire(inputs) * 2 + add)
    first.close(), second.close()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: on one, a stream's wait can hold up the others' launches")
@pytest.mark.parametrize("overlap", [False, True])
@LIMITS
def test_quantised_micro_batches_go_their_own_way_in_streams_of_their_own(limit: int, overlap: bool) -> None:
    geometry = Geometry(64, 2048, slots=3, packed_limit=limit, wire=WIRE)
    first, second = make(geometry, overlap=overlap)
    lanes = [(torch.cuda.Stream(DEVICES[0]), torch.cuda.Stream(DEVICES[1])) for _ in range(3)]
    inputs = [torch.randn(30, rows, 2048, device=DEVICES[0]).bfloat16() for rows in (64, 17, 1)]
    outputs = [torch.zeros_like(part) for part in inputs]
    # The FFN's kernels have run once: loading one may wait for what runs.
    for slot, part in enumerate(inputs):
        first.send(part[0], 0, slot)
        second.send(second.receive(part.shape[1], 0, slot) * 2, 0, slot)
        first.receive(part.shape[1], 0, slot)
        wait()
    for layer in range(30):
        for slot, (ours, theirs) in enumerate(lanes):
            with torch.cuda.stream(ours):
                first.exchange(inputs[slot][layer], layer, slot, outputs[slot][layer])
            with torch.cuda.stream(theirs):
                second.send(second.receive(inputs[slot].shape[1], layer, slot) * 2, layer, slot)
    wait()
    assert first.status().code == second.status().code == HopCode.OK
    for part, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out.cpu(), through_the_wire(part) * 2)
    first.close(), second.close()


@LIMITS
def test_a_quantised_message_of_another_hop_is_an_error_and_what_follows_ends_at_once(limit: int) -> None:
    geometry = Geometry(8, 272, packed_limit=limit, wire=WIRE)
    sent = torch.randn(4, 272, device=DEVICES[0]).bfloat16()
    for layer, rows, skip, code, expected, found in (
        (2, 4, 0, HopCode.PLACE, 2 << 16, 1 << 16),
        (1, 3, 0, HopCode.ROWS, 3, 4),
        (1, 4, 7, HopCode.SEQUENCE, 1, 8),
    ):
        first, second = make(geometry)
        if skip:  # the sender has counted further than the receiver
            first._state[32:34] = skip
        first.send(sent, 1)
        second.receive(rows, layer)
        wait()
        status = second.status()
        assert (status.code, status.expected, status.found) == (code, expected, found), str(status)
        started = time.monotonic()
        for later in range(100):
            second.send(noise(4, geometry, DEVICES[1]), later)
            second.receive(4, later)
        wait()
        assert time.monotonic() - started < 1 and second.status() == status
        assert not first.slot().count_nonzero()  # nothing was sent after the error
        for side in (first, second):
            side.reset()
        first.send(sent, 1)
        assert same(second.receive(4, 1), through_the_wire(sent)) and second.status().code == HopCode.OK
        first.send(sent, 2)
        wait()
        assert first.status().code == HopCode.TURN
        first.close(), second.close()


@LIMITS
def test_a_wait_for_quantised_rows_ends_at_its_deadline_and_by_abort(limit: int) -> None:
    geometry = Geometry(8, 272, packed_limit=limit, wire=WIRE)
    for side in (0, 1):
        pair = make(geometry, deadline_s=0.5)
        started = time.monotonic()
        for layer in range(50):
            if side == 0:
                pair[0].exchange(torch.randn(4, 272, device=DEVICES[0]).bfloat16(), layer)
            else:
                pair[1].receive(4, layer)
        wait()
        assert 0.4 < time.monotonic() - started < 20.0
        status = pair[side].status()
        assert (status.code, status.layer, status.expected) == (HopCode.DEADLINE, 0, 1)
        pair[0].close(), pair[1].close()
    first, second = make(geometry, deadline_s=30)
    threading.Timer(0.3, second.abort).start()
    started = time.monotonic()
    second.receive(4, 5)
    wait()
    assert 0.2 < time.monotonic() - started < 20.0
    assert (second.status().code, second.status().layer) == (HopCode.ABORTED, 5)
    first.close(), second.close()


# The norm


def norm_inputs(geometry: Geometry, rows: int, device: str) -> list[torch.Tensor]:
    """Hidden, residual and weight."""
    dtype = getattr(torch, geometry.dtype)
    scale = torch.exp2(torch.randint(-3, 4, (rows, 1), device=device))
    hidden, residual = (torch.randn(rows, geometry.hidden, device=device) * scale for _ in range(2))
    return [part.to(dtype) for part in (hidden, residual, 1 + torch.randn(geometry.hidden, device=device) / 4)]


@pytest.mark.parametrize("hidden", [16, 1040, 2048, 7168, 7936, 15872])
@pytest.mark.parametrize("seed", range(6))
def test_the_rows_of_a_norm_are_the_references_within_its_bound(hidden: int, seed: int) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    dtype = "float32" if seed % 3 == 2 and hidden <= 7936 else DTYPES[seed % 2]
    geometry = Geometry(
        9,
        hidden,
        dtype,
        slots=2,
        packed_limit=1 << 20,
        packed_blocks=pick.choice([1, 2, 128]),
        packed_workers=pick.choice([32, 256, 992]),
        packed_ungated=pick.choice([0, 128]),
    )
    first, second = make(geometry, overlap=bool(seed % 2))
    for number, rows in enumerate((1, 9, pick.randint(1, 9)), start=1):
        states, residual, weight = norm_inputs(geometry, rows, DEVICES[0])
        normed, total = reference.norm(states.cpu(), residual.cpu(), weight.cpu(), 1e-5)
        first.send_norm(states, residual, weight, 1e-5, 3, 1)
        wait()
        assert first.status().code == HopCode.OK and same(residual, total)
        found = second.slot(1).cpu()
        travelled = reference.read(found.clone(), geometry, rows, number, 3, 1)
        assert close(travelled, normed)
        got = second.receive(rows, 3, 1)
        wait()
        assert second.status().code == HopCode.OK and same(got, travelled)
        # Byte for byte the slot is that of a plain message of these rows.
        plain = torch.zeros_like(found)
        reference.write(plain, geometry, travelled, number, 3, 1)
        assert torch.equal(found[: geometry.payload_at], plain[: geometry.payload_at])
        second.send(got, 3, 1)
        assert same(first.receive(rows, 3, 1), travelled)
    first.close(), second.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copied", [False, True])
def test_an_exchange_with_a_norm_finds_what_the_reference_wrote(dtype: str, copied: bool) -> None:
    geometry = Geometry(70, 1040, dtype, slots=2, packed_limit=1 << 20, packed_blocks=64)
    first, second = make(geometry)
    for number, rows in enumerate((1, 70, 13, 64), start=1):
        states, residual, weight = norm_inputs(geometry, rows, DEVICES[0])
        normed, total = reference.norm(states.cpu(), residual.cpu(), weight.cpu(), 1e-6)
        reply = noise(rows, geometry, "cpu")
        out = torch.zeros_like(states) if copied else None
        got = first.exchange_norm(states, residual, weight, 1e-6, 9, 1, out)
        request = answer((first, second), geometry, reply, number, 9, 1)
        wait()
        assert first.status().code == HopCode.OK and same(got, reply) and same(residual, total)
        assert close(request, normed)
    first.close(), second.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_replayed_graphs_norm_new_rows_each_time_and_carry_the_residual(streams, rows: int, overlap: bool) -> None:
    geometry = Geometry(64, 2048)
    first, second = make(geometry, overlap=overlap)
    layers = 6
    inputs = torch.zeros(layers, rows, 2048, dtype=torch.bfloat16, device=DEVICES[0])
    outputs = torch.zeros_like(inputs)
    residual = torch.zeros_like(inputs[0])
    weight = 1 + torch.randn(layers, 2048, device=DEVICES[0]).bfloat16() / 4
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.device(DEVICES[0]), torch.cuda.graph(graphs[0], stream=streams[0]):
        for layer in range(layers):
            first.exchange_norm(inputs[layer], residual, weight[layer], 1e-6, layer, out=outputs[layer])
    with torch.cuda.device(DEVICES[1]), torch.cuda.graph(graphs[1], stream=streams[1]):
        for layer in range(layers):
            second.send(second.receive(rows, layer), layer)
    for _ in range(20):
        inputs.normal_()
        residual.normal_()
        outputs.fill_(float("nan"))
        carried = residual.cpu()
        wait()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        wait()
        assert first.status().code == second.status().code == HopCode.OK
        for layer in range(layers):
            expected, carried = reference.norm(inputs[layer].cpu(), carried, weight[layer].cpu(), 1e-6)
            assert close(outputs[layer], expected)
        assert same(residual, carried)
    first.close(), second.close()


def test_wrong_use_is_refused_before_a_rowwise_launch() -> None:
    geometry = Geometry(70, 2048)
    first, second = make(geometry)
    rows, residual, weight = norm_inputs(geometry, 4, DEVICES[0])
    with pytest.raises(HopError, match="send_norm: expected the side that sends first"):
        second.send_norm(rows, residual, weight, 1e-6, 0)
    with pytest.raises(HopError, match="exchange_norm: expected the side that sends first"):
        second.exchange_norm(rows, residual, weight, 1e-6, 0)
    for states, other, factor in (
        (rows, residual[:3], weight),
        (rows, residual.float(), weight),
        (rows, residual, weight[:1024]),
        (rows, residual, weight.float()),
        (rows, residual, torch.cat((weight, weight))[1:2049]),
        (rows.cpu(), residual, weight),
    ):
        with pytest.raises(HopError, match=r"hop: expected \["):
            first.send_norm(states, other, factor, 1e-6, 0)
    states, residual, weight = norm_inputs(geometry, 65, DEVICES[0])
    with pytest.raises(LayoutError, match=r"norm: expected a message of at most 262144 bytes .*, found 65 rows"):
        first.exchange_norm(states, residual, weight, 1e-6, 0)
    assert first.status().code == HopCode.OK
    first.close(), second.close()
    quantised = Geometry(70, 2048, wire=WIRE)
    first, second = make(quantised)
    with pytest.raises(LayoutError, match=f"norm: .*found bfloat16 sent as {WIRE}; compute the norm first"):
        first.exchange_norm(rows, residual[:4], weight, 1e-6, 0)
    with pytest.raises(HopError, match=r"hop: expected \["):
        first.exchange(states, 0, out=torch.zeros_like(states)[:64])
    wait()
    assert not second.slot().count_nonzero()
    alone = HopBuffers.create(0, 0, "", 0, DEVICES[1], initiator=False, geometry=geometry)
    other = HopBuffers.create(0, 0, "", 0, DEVICES[0], initiator=True, geometry=quantised)
    with pytest.raises(LayoutError, match=f"wire: expected {WIRE} as on this side, found none"):
        other.connect(alone)
    first.close(), second.close(), alone.close(), other.close()
