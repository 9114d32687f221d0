"""A worker ends itself when the server's first process has ended."""

import subprocess
import sys
import threading

import pytest

from afdpatch.runtime.owner import Owner, OwnerEnded
from afdpatch.runtime.peer_watch import PeerWatch
from afdpatch.runtime.status import State, StatusPage

from .helpers import until

OWNER = """
import sys
from afdpatch.runtime.status import StatusPage
page = StatusPage.create("attention")
print(page.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner():
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        process.path = process.stdout.readline().strip()
        yield process
        process.kill()


def ended(watch):
    try:
        watch.check()
    except OwnerEnded:
        return True
    return False


def test_the_end_of_the_owner_is_seen_even_by_sigkill(owner):
    watch = Owner(StatusPage.open(owner.path))
    assert not ended(watch)
    owner.kill()
    until(lambda: ended(watch), "its end is seen")
    with pytest.raises(OwnerEnded, match=f"first process {owner.pid} has ended"):
        watch.check()
    watch.close()
    watch.close()
    assert ended(watch)


def test_an_owner_that_ended_before_the_watch_began_is_seen(owner):
    page = StatusPage.open(owner.path)
    owner.kill()
    owner.wait()
    assert ended(Owner(page))


def test_a_process_that_has_the_owners_id_by_now_is_not_the_owner(owner):
    page = StatusPage.open(owner.path)
    # As if the id had gone to another process, which has no page there: process 1.
    page.path = "/proc/1/fd/99999"
    assert ended(Owner(page))


def test_the_owner_itself_has_nothing_to_watch():
    assert not ended(Owner(StatusPage.create("ffn")))


def test_a_worker_that_sends_no_hops_beats_and_ends_with_its_server(owner):
    page = StatusPage.open(owner.path)
    page.set_state(State.READY)
    told = []
    end = threading.Event()

    def orphaned(error):
        told.append(error)
        end.set()

    watch = PeerWatch(None, page, period_s=0.02, on_orphaned=orphaned)
    watch.start()
    last = page.snapshot().heartbeat_ns
    until(lambda: page.snapshot().heartbeat_ns > last, "another beat")
    owner.kill()
    assert end.wait(20)
    assert isinstance(told[0], OwnerEnded)
    assert page.snapshot().state is State.FAILED and "has ended" in page.snapshot().last_error
    assert watch.stop()
