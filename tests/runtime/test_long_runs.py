"""Memory and descriptors over many hops and many connections."""

import gc
import os

import pytest
import torch

from afdpatch.runtime.status import StatusPage

from .helpers import HIDDEN, connected, ffn_process, new_address, until


@pytest.fixture(params=["shm", "tcp"])
def address(request):
    return new_address(request.param)


@pytest.fixture
def page():
    return StatusPage.create("ffn")


@pytest.fixture
def ffn(address, page):
    with ffn_process(address, page) as process:
        yield process


def test_descriptors_and_memory_stay_flat_over_20000_hops(address, ffn):
    def used(pid):
        with open(f"/proc/{pid}/statm") as text:
            return int(text.read().split()[1]) * 4096, len(os.listdir(f"/proc/{pid}/fd"))

    with connected(address) as attention:
        hidden = torch.ones(4, HIDDEN)
        for _ in range(2000):
            attention.hop(hidden, 0)
        before = [used(pid) for pid in (os.getpid(), ffn.pid)]
        for _ in range(20_000):
            attention.hop(hidden, 0)
        after = [used(pid) for pid in (os.getpid(), ffn.pid)]
    for (memory, fds), (memory_later, fds_later) in zip(before, after, strict=True):
        assert fds_later == fds
        assert memory_later - memory < 4 << 20


def test_connecting_again_and_again_leaks_nothing(address, ffn, page):
    def used():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), ffn.pid)]

    with connected(address) as attention:
        attention.hop(torch.ones(1, HIDDEN), 0)
    until(lambda: page.snapshot().peers == 0, "it has left")
    gc.collect()  # what earlier tests left
    before = used()
    for _ in range(100):
        with connected(address) as attention:
            attention.hop(torch.ones(1, HIDDEN), 0)
    until(
        lambda: page.snapshot().peers == 0 and max(map(int.__sub__, used(), before)) <= 0, "all descriptors are closed"
    )


def test_no_descriptor_is_inherited(address, ffn):
    def inheritable(pid):
        found = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                with open(f"/proc/{pid}/fdinfo/{fd}") as text:
                    flags = int(text.read().split("flags:")[1].split()[0], 8)
            except OSError:
                continue  # the listing's own descriptor
            if not flags & os.O_CLOEXEC and link.startswith(("/memfd:", "socket:", "anon_inode:[event")):
                found.add(link)
        return found

    before = inheritable(os.getpid())
    with connected(address):
        assert inheritable(os.getpid()) <= before
        assert not [link for link in inheritable(ffn.pid) if "afdpatch-hop" in link or "event" in link]
