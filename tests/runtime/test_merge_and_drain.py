"""The FFN loop with several attention ranks: hops computed together, one that fails, one that leaves, and the drain."""

import contextlib
import subprocess
import sys
import threading
import time

import pytest
import torch

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import (
    MERGED_ROWS,
    ConnectionRefused,
    ConnectorError,
    FfnError,
    IncomingHop,
    batches,
)
from afdpatch.runtime.connectors.factory import attention_connectors, ffn_connector
from afdpatch.runtime.events import Event
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.metrics import health
from afdpatch.runtime.owner import OwnerEnded
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.protocol import DTYPE_CODES, Header, Kind
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import PeerState, State, StatusPage

from .helpers import HIDDEN, greeting, new_address, until

SLOW = threading.Event()  # never set: a computation that takes a while, so that hops meet


def settings(attention=3, ffn=1, host=None):
    extra = {"connect_timeout_s": 30.0, "hop_timeout_s": 20.0, "recovery_timeout_s": 30.0}
    counts = {"num_attention_ranks": attention, "num_ffn_ranks": ffn}
    return AfdConfig.parse({"host": host or new_address().strip("\0"), **counts, "connector_extra_config": extra})


def hello(role, config, rank):
    counts = {"num_attention_ranks": config.num_attention_ranks, "num_ffn_ranks": config.num_ffn_ranks}
    return greeting(role, rank=rank, micro_batches=1, **counts)


def double(layer, hidden):
    SLOW.wait(0.002)
    return hidden * 2 + layer


@contextlib.contextmanager
def serving(config, page, compute=double, rank=0, **options):
    loop = FfnLoop(ffn_connector(config, rank, page), compute, page, hello("ffn", config, rank), **options)
    loop.start()
    loop.serve()
    page.set_state(State.READY)
    try:
        yield loop
    finally:
        assert loop.stop()


@contextlib.contextmanager
def routes(config, count, pages=None):
    with contextlib.ExitStack() as stack:
        found = []
        for rank in range(count):
            route = Route(config, rank, pages[rank] if pages else None)
            stack.callback(route.close)
            route.connect(hello("attention", config, rank))
            route.wait_ready()
            found.append(route)
        yield found


@contextlib.contextmanager
def senders(found, send):
    """A thread for each route that calls ``send(route, rank, round)`` again and again; its errors are the test's."""
    end = threading.Event()
    errors = []

    def run(rank, route):
        number = 0
        try:
            while not end.is_set():
                number += 1
                send(route, rank, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(found)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        end.set()
        for thread in threads:
            thread.join(60)
    assert errors == []


def rows_of(rank, number):
    """What a rank sends in a round: of its own size and values."""
    return torch.full((rank + 1 + number % 3, HIDDEN), float(rank * 1000 + number % 97))


def right(route, rank, number):
    layer = number % 2
    hidden = rows_of(rank, number)
    assert torch.equal(route.hop(hidden, layer), hidden * 2 + layer), (rank, number)


def test_hops_of_one_layer_are_computed_together_and_each_peer_gets_its_own_rows(page):
    config = settings()
    batches = []

    def compute(layer, hidden):
        batches.append(hidden.shape[0])
        return double(layer, hidden)

    with serving(config, page, compute), routes(config, 3) as found, senders(found, right) as errors:
        until(lambda: errors or page.snapshot().events[Event.MERGED] >= 20, "hops are merged")
    seen = page.snapshot()
    assert seen.hops > len(batches) == sum(seen.compute_times.counts)
    assert seen.rows == sum(batches)


def test_without_merge_each_hop_is_computed_alone(page):
    config = settings()
    with serving(config, page, merge=False), routes(config, 3) as found, senders(found, right) as errors:
        until(lambda: errors or page.snapshot().hops >= 60, "sixty hops")
    assert page.snapshot().events[Event.MERGED] == 0
    assert sum(page.snapshot().compute_times.counts) == page.snapshot().hops


def test_a_hop_that_fails_does_not_fail_those_that_were_merged_with_it(page):
    config = settings()
    together = []

    def compute(layer, hidden):
        if (hidden < 0).any():
            if (hidden >= 0).any():
                together.append(hidden.shape[0])
            raise ValueError("a bad row")
        return double(layer, hidden)

    def send(route, rank, number):
        if rank:
            return right(route, rank, number)
        with pytest.raises(FfnError, match="a bad row"):
            route.hop(torch.full((2, HIDDEN), -1.0), number % 2)

    with serving(config, page, compute), routes(config, 3) as found, senders(found, send) as errors:
        until(lambda: errors or len(together) >= 5, "a bad hop meets others")
    assert page.snapshot().events[Event.ERROR] > 0 and "a bad row" in page.snapshot().last_error


def test_a_merged_result_of_another_shape_is_no_answer_to_anybody(page):
    config = settings()
    wrong = []

    def compute(layer, hidden):
        if hidden.shape[0] > 5:  # more than one rank sends
            wrong.append(hidden.shape[0])
            return hidden[:-1]
        return double(layer, hidden)

    with serving(config, page, compute), routes(config, 3) as found, senders(found, right) as errors:
        until(lambda: errors or len(wrong) >= 5, "a merged result has another shape")


def test_a_peer_that_leaves_between_its_hop_and_the_answer_is_passed_over(page):
    config = settings()
    left = threading.Event()
    found = []

    def compute(layer, hidden):
        if found and not left.is_set() and (hidden == -7).any() and hidden.shape[0] > 1:
            found[0].close()
            left.set()
        return double(layer, hidden)

    def send(route, rank, number):
        if rank:
            right(route, rank, number)
        elif left.is_set():
            SLOW.wait(0.01)
        else:
            with contextlib.suppress(ConnectorError):
                route.hop(torch.full((1, HIDDEN), -7.0), number % 2)

    with serving(config, page, compute), routes(config, 3) as made:
        found += made
        with senders(made, send) as errors:
            until(lambda: errors or left.is_set(), "a peer leaves in a merged hop")
            before = page.snapshot().hops
            until(lambda: errors or page.snapshot().hops > before + 20, "the others go on")
            until(lambda: errors or page.snapshot().peers == 2, "its place is free")


def test_a_batch_has_no_more_rows_than_are_worth_it():
    def hop(rows):
        header = Header(Kind.HOP, DTYPE_CODES["float32"], 1, 1, 0, 0, rows, HIDDEN, 0, rows * HIDDEN * 4)
        return IncomingHop(0, header, torch.empty(rows, HIDDEN))

    sizes = [500, 12, 1, 600, 1, 511]
    cut = [[hop.header.rows for hop in batch] for batch in batches([hop(rows) for rows in sizes])]
    assert cut == [[500, 12], [1], [600], [1, 511]] and MERGED_ROWS == 512


def test_the_page_names_the_peers_and_counts_the_time_without_work(page):
    config = settings()
    with serving(config, page), routes(config, 3) as found:
        until(lambda: [peer.rank for peer in page.snapshot().peers_named] == [0, 1, 2], "three peers are named")
        waited = page.snapshot().wait_s
        until(lambda: page.snapshot().wait_s > waited, "waiting is counted")
        found[1].close()
        until(lambda: [peer.rank for peer in page.snapshot().peers_named] == [0, 2], "two peers are named")


def test_a_drained_server_loses_no_hop_of_its_peers_and_takes_them_again():
    config = settings(attention=1, ffn=2)
    pages = [StatusPage.create("ffn", first_rank=rank) for rank in (0, 1)]
    ours = StatusPage.create("attention")
    ours.set_state(State.READY)
    with contextlib.ExitStack() as stack:
        for rank, page in enumerate(pages):
            stack.enter_context(serving(config, page, rank=rank))
        (route,) = stack.enter_context(routes(config, 1, [ours]))
        watch = PeerWatch(route, ours, period_s=0.05)
        watch.start()
        stack.callback(watch.stop)
        errors = stack.enter_context(senders([route], right))
        until(lambda: errors or all(page.snapshot().hops > 5 for page in pages), "both serve")

        pages[0].request_drain(True)
        until(lambda: errors or pages[0].snapshot().drained, "the first one is drained")
        until(lambda: errors or pages[0].snapshot().events[Event.DRAINED] == 1, "which is told once")
        fine, why = health([pages[0].snapshot()], time.monotonic())
        assert not fine and why.endswith("draining")
        with pytest.raises(ConnectionRefused, match="draining") as refused:
            attention_connectors(config)(0).connect(greeting("attention"), time.monotonic() + 10)
        assert refused.value.retry
        assert pages[0].snapshot().events[Event.REFUSED] == 0, "nothing is wrong about it"
        before = pages[0].snapshot().hops, pages[1].snapshot().hops
        until(lambda: errors or pages[1].snapshot().hops > before[1] + 20, "the other one serves on")
        assert pages[0].snapshot().hops == before[0]
        assert health([ours.snapshot()], time.monotonic())[0]

        pages[0].request_drain(False)
        until(lambda: errors or pages[0].snapshot().hops > before[0] + 5, "it serves again")
        seen = pages[0].snapshot()
        assert (seen.events[Event.DRAINING], seen.events[Event.RESUMED], seen.draining) == (1, 1, False)
        assert ours.snapshot().peer_state is PeerState.CONNECTED


OWNER = """
import sys
from afdpatch.runtime.status import StatusPage
page = StatusPage.create("ffn")
print(page.path, flush=True)
sys.stdin.read()
"""


def test_an_orphaned_ffn_worker_ends_and_leaves_its_address_free(page):
    config = settings(attention=1)
    deaths = []
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        theirs = StatusPage.open(owner.stdout.readline().strip())
        with serving(config, theirs, on_death=deaths.append) as loop:
            owner.kill()
            until(lambda: not loop.alive, "the loop ends")
    assert isinstance(deaths[0], OwnerEnded) and theirs.snapshot().state is State.FAILED
    with serving(config, page), routes(config, 1) as (route,):
        assert torch.equal(route.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
