import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from afdpatch.runtime.events import Event
from afdpatch.runtime.metrics import health, render
from afdpatch.runtime.status import Peer, PeerState, State, StatusPage, StatusPages


def series(text):
    return {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k not in ("role", "rank"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def page():
    page = StatusPage.create("attention", "abcd")
    page.set_state(State.READY)
    page.set_worker(77)
    page.set_peers(1)
    page.set_peer_state(PeerState.CONNECTED)
    page.beat()
    return page


def test_every_number_of_the_page_is_rendered(page):
    page.begin_step()
    page.count_hop(3, 100, 30_000)
    page.count_hop(1, 50, 60_000_000_000)
    page.end_step()
    page.count(Event.ERROR, "e")
    page.count(Event.REFUSED)
    page.count(Event.REPEAT, number=3)
    page.set_queue(4)
    page.name_peers([Peer(7, 70, page.snapshot().heartbeat_ns)])
    page.set_weights(10, 4, 6)
    snapshot = page.snapshot()
    seen = series(render([snapshot], snapshot.heartbeat_ns / 1e9 + 2.5))
    assert seen[("afd_hops_total",)] == 2 and seen[("afd_rows_total",)] == 4 and seen[("afd_steps_total",)] == 1
    assert seen[("afd_payload_bytes_total", ("direction", "a2f"))] == 150
    assert seen[("afd_payload_bytes_total", ("direction", "f2a"))] == 150
    assert seen[("afd_errors_total",)] == 1 and seen[("afd_peers_refused_total",)] == 1
    assert seen[("afd_hops_repeated_total",)] == 3 and seen[("afd_takeovers_total",)] == 0
    assert seen[("afd_wait_seconds_total",)] == pytest.approx(60.00003)
    assert seen[("afd_queued_hops",)] == 4 and seen[("afd_draining",)] == 0
    assert seen[("afd_peer_message_age_seconds", ("peer", "7"))] == pytest.approx(2.5)
    assert seen[("afd_peer_state", ("state", "connected"))] == 1 and seen[("afd_peer_state", ("state", "lost"))] == 0
    assert seen[("afd_last_step_hops",)] == 2 and seen[("afd_last_step_bytes",)] == 300
    assert seen[("afd_peers",)] == 1 and seen[("afd_peer_up",)] == 1 and seen[("afd_worker_pid",)] == 77
    assert seen[("afd_heartbeat_age_seconds",)] == pytest.approx(2.5)
    assert seen[("afd_build_info", ("manifest_digest", "abcd"))] == 1
    assert seen[("afd_weight_tensors", ("taken", "read"))] == 4 and seen[("afd_weight_bytes",)] == 10
    assert seen[("afd_weight_tensors", ("taken", "skipped"))] == 6
    assert seen[("afd_state", ("state", "ready"))] == 1 and seen[("afd_state", ("state", "failed"))] == 0
    assert seen[("afd_hop_seconds_bucket", ("le", "2e-05"))] == 0
    assert seen[("afd_hop_seconds_bucket", ("le", "5e-05"))] == 1
    assert seen[("afd_hop_seconds_bucket", ("le", "10.0"))] == 1
    assert seen[("afd_hop_seconds_bucket", ("le", "+Inf"))] == seen[("afd_hop_seconds_count",)] == 2
    assert seen[("afd_hop_seconds_sum",)] == pytest.approx(60.00003)
    assert seen[("afd_step_seconds_count",)] == 1 and seen[("afd_ffn_compute_seconds_count",)] == 0


def test_every_series_has_the_role(page):
    for family in text_string_to_metric_families(render([page.snapshot()])):
        assert family.name.startswith("afd_") and family.documentation
        for sample in family.samples:
            assert (sample.labels["role"], sample.labels["rank"]) == ("attention", "0")


def test_without_a_heartbeat_there_is_no_age():
    assert ("afd_heartbeat_age_seconds",) not in series(render([StatusPage.create("ffn").snapshot()]))


def test_a_ready_server_with_a_fresh_heartbeat_is_healthy(page):
    snapshot = page.snapshot()
    beat = snapshot.heartbeat_ns / 1e9
    assert health([snapshot], beat + 4.9)[0]
    fine, why = health([snapshot], beat + 5.1)
    assert not fine and "no sign of life from its worker 77 for 5.1 s" in why


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.STOPPED])
def test_a_server_that_is_not_ready_is_not_healthy(page, state):
    fine, why = health([dataclasses.replace(page.snapshot(), state=state)], 0)
    assert not fine and state.name.lower() in why


def test_a_failed_server_gives_its_reason(page):
    page.fail("no weights")
    assert health([page.snapshot()], 0) == (False, "attention server, rank 0: failed: no weights")


def test_a_ready_server_that_never_beat_is_not_healthy(page):
    fine, why = health([dataclasses.replace(page.snapshot(), heartbeat_ns=0)], 1)
    assert not fine and "sign of life" in why


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (PeerState.WAITING, "FFN server is not connected"),
        (PeerState.LOST, "lost, hops wait"),
        (PeerState.GIVEN_UP, "given up"),
    ],
)
def test_without_its_peer_attention_is_not_healthy_and_says_how_it_stands(page, state, words):
    page.set_peer_state(state)
    page.set_error("the last one")
    fine, why = health([page.snapshot()], page.snapshot().heartbeat_ns / 1e9)
    assert not fine and words in why and "the last one" in why


def test_a_worker_that_sends_no_hops_needs_no_peer(page):
    page.set_peer_state(PeerState.NONE)
    page.set_peers(0)
    assert health([page.snapshot()], page.snapshot().heartbeat_ns / 1e9)[0]


def test_an_ffn_server_is_fine_without_peers_and_not_while_it_drains():
    page = StatusPage.create("ffn")
    page.set_state(State.READY)
    page.beat()
    assert health([page.snapshot()], page.snapshot().heartbeat_ns / 1e9)[0]
    page.set_draining(True)
    fine, why = health([page.snapshot()], page.snapshot().heartbeat_ns / 1e9)
    assert not fine and why.endswith("draining")


def test_every_worker_must_be_fine_and_the_worst_is_told_with_its_rank():
    first = StatusPage.create("attention", ranks=3, first_rank=2)
    pages = StatusPages(first.path)
    for page in pages.pages:
        page.set_state(State.READY)
        page.set_peer_state(PeerState.CONNECTED)
        page.beat()
    now = pages.pages[0].snapshot().heartbeat_ns / 1e9
    assert health(pages.snapshots(), now)[0]
    pages.pages[1].set_peer_state(PeerState.LOST)
    assert health(pages.snapshots(), now)[1].startswith("attention server, rank 3: its FFN server is lost")
    pages.pages[2].set_peer_state(PeerState.GIVEN_UP)
    assert health(pages.snapshots(), now)[1].startswith("attention server, rank 4: given up")
    assert 'afd_peer_state{rank="3",role="attention",state="lost"} 1.0' in render(pages.snapshots())
