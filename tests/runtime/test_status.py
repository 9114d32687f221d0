import gc
import os
import subprocess
import sys

import pytest

from afdpatch.runtime.status import (
    BUCKETS_NS,
    ENVIRONMENT_KEY,
    Peer,
    State,
    StatusPage,
    StatusPageError,
    StatusPages,
)

from .helpers import until

WRITER = """
import os, sys
from afdpatch.runtime.events import Event
from afdpatch.runtime.status import State, StatusPage
page = StatusPage.from_environment()
page.set_worker(); page.set_state(State.READY); page.beat(); page.set_peers(2)
page.begin_step(); page.count_hop(3, 100, 30_000); page.count_hop(1, 50, 11_000_000_000); page.end_step()
page.count_compute(9_000); page.count(Event.ERROR, "first")
page.count(Event.REFUSED, "second"); page.set_weights(10, 4, 6)
page.set_manifest_digest("abcd")
"""


def test_what_another_process_writes_is_read_here(monkeypatch):
    page = StatusPage.create("ffn")
    monkeypatch.setenv(ENVIRONMENT_KEY, page.path)
    with subprocess.Popen([sys.executable, "-c", WRITER]) as worker:
        assert worker.wait() == 0
    seen = page.snapshot()
    assert (seen.role, seen.state, seen.worker_pid, seen.peers) == ("ffn", State.READY, worker.pid, 2)
    assert (seen.hops, seen.rows, seen.bytes_a2f, seen.bytes_f2a) == (2, 4, 150, 150)
    assert (seen.steps, seen.last_step_hops, seen.last_step_bytes) == (1, 2, 300)
    assert (seen.errors, seen.peers_refused, seen.last_error) == (1, 1, "second")
    assert (seen.weight_bytes, seen.weights_read, seen.weights_skipped) == (10, 4, 6)
    assert seen.manifest_digest == "abcd" and seen.heartbeat_ns > 0
    assert seen.compute_times.counts[0] == 1 and sum(seen.step_times.counts) == 1


def test_only_the_hops_between_begin_and_end_belong_to_a_step():
    page = StatusPage.create("attention")
    page.count_hop(1, 8, 0)
    page.begin_step()
    page.count_hop(1, 8, 0)
    page.end_step()
    page.count_hop(1, 8, 0)
    assert page.snapshot().last_step_hops == 1 and page.snapshot().last_step_bytes == 16


def test_the_histogram_has_bounds_from_10_us_to_10_s_and_a_rest():
    page = StatusPage.create("ffn")
    for nanoseconds in (-5, 0, 10_000, 10_001, 10_000_000_000, 10_000_000_001):
        page.count_compute(nanoseconds)
    times = page.snapshot().compute_times
    assert times.bounds_s[0] == pytest.approx(1e-5) and times.bounds_s[-1] == 10 and len(BUCKETS_NS) == 19
    assert (times.counts[0], times.counts[1], times.counts[-2], times.counts[-1]) == (3, 1, 1, 1)
    assert times.sum_s == pytest.approx(20.0, abs=0.001)
    assert page.snapshot().hop_times.counts == (0,) * 20


def test_failed_is_final():
    page = StatusPage.create("ffn")
    page.fail("out of memory")
    page.set_state(State.READY)
    assert page.snapshot().state is State.FAILED and page.snapshot().last_error == "out of memory"


def test_a_long_error_is_cut_to_a_kib_and_stays_text():
    page = StatusPage.create("ffn")
    page.set_error("x" + "é" * 2000)
    assert page.snapshot().last_error == "x" + "é" * 511
    page.set_error("short")
    assert page.snapshot().last_error == "short"


CHANGING = """
import sys
from afdpatch.runtime.status import StatusPage
page = StatusPage.open(sys.argv[1])
while True:
    page.set_error("a" * 1000)
    page.set_error("b" * 500)
"""


def test_a_reader_never_sees_a_half_written_error():
    page = StatusPage.create("ffn")
    with subprocess.Popen([sys.executable, "-c", CHANGING, page.path]) as writer:
        try:
            until(lambda: bool(page.snapshot().last_error), "the writer writes", 60)
            seen = set()

            def read():
                seen.update(page.snapshot().last_error for _ in range(20_000))
                return len(seen) > 1

            until(read, "both texts are seen", 60)
            assert seen == {"a" * 1000, "b" * 500}
        finally:
            writer.kill()


def test_no_environment_no_page(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_KEY, raising=False)
    assert StatusPage.from_environment() is None


def test_a_page_that_has_gone_says_what_to_do(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_KEY, "/proc/1/fd/99999")
    with pytest.raises(StatusPageError, match="restart the server"):
        StatusPage.from_environment()


def test_something_else_is_no_page():
    gc.collect()  # what earlier tests left
    for size in (0, 8192):
        fd = os.memfd_create("other")
        os.ftruncate(fd, size)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StatusPageError, match="expected"):
            StatusPage.open(f"/proc/self/fd/{fd}")
        assert len(os.listdir("/proc/self/fd")) <= before
        os.close(fd)


def test_an_unknown_role_is_refused():
    with pytest.raises(StatusPageError, match="expected one of attention, ffn"):
        StatusPage.create("proxy")


def test_the_page_outlives_its_worker_and_goes_with_its_server():
    def maps():
        with open("/proc/self/maps") as lines:
            return sum("afdpatch-status-attention" in line for line in lines)

    gc.collect()  # what earlier tests left
    before = maps()
    page = StatusPage.create("attention")
    other = StatusPage.open(page.path)
    assert maps() == before + 2
    other.close()
    page.beat()
    page.close()
    until(lambda: maps() <= before, "both mappings are gone")


def test_each_worker_has_a_page_of_its_own_in_one_memory(monkeypatch):
    first = StatusPage.create("attention", "abcd", ranks=3, first_rank=4)
    monkeypatch.setenv(ENVIRONMENT_KEY, first.path)
    for index in range(3):
        page = StatusPage.from_environment(index)
        page.set_peers(index + 1)
        page.set_error(f"of worker {index}")
        page.name_peers([Peer(index, 100 + index, 5)] * (index + 1))
        page.close()
    seen = StatusPages.from_environment().snapshots()
    assert [(page.rank, page.peers, page.last_error, page.manifest_digest) for page in seen] == [
        (4, 1, "of worker 0", "abcd"),
        (5, 2, "of worker 1", "abcd"),
        (6, 3, "of worker 2", "abcd"),
    ]
    assert seen[2].peers_named == (Peer(2, 102, 5),) * 3
    with pytest.raises(StatusPageError, match="found pages for 3 workers, expected one for worker 3"):
        StatusPage.from_environment(3)


def test_a_page_names_64_peers_at_most():
    page = StatusPage.create("ffn", ranks=2)
    page.set_error("x" * 1024)
    page.set_error("y" * 1024)
    peers = [Peer(rank, 2**22 + rank, rank) for rank in range(65)]
    page.name_peers(peers)
    assert page.snapshot().peers_named == tuple(peers[:64]) and page.snapshot().last_error == "y" * 1024
    assert StatusPage.open(page.path, 1).snapshot().peers_named == ()
    page.name_peers([])
    assert page.snapshot().peers_named == ()


def test_a_wish_to_drain_goes_to_every_worker():
    first = StatusPage.create("ffn", ranks=2)
    other = StatusPage.open(first.path, 1)
    readers = StatusPages(first.path)
    readers.request_drain(True)
    assert first.drain_requested and other.drain_requested
    readers.request_drain(False)
    assert not first.drain_requested and not other.drain_requested
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    readers.close()
    assert len(os.listdir("/proc/self/fd")) == before - 4  # each page has its own and the one of its mapping
