import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families

from afdpatch.runtime.events import Event
from afdpatch.runtime.metrics import health, render
from afdpatch.runtime.status import State, StatusPage


def series(text):
    return {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k != "role")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def page():
    page = StatusPage.create("attention", "abcd")
    page.set_state(State.READY)
    page.set_worker(77)
    page.set_peers(1)
    page.beat()
    return page


def test_every_number_of_the_page_is_rendered(page):
    page.begin_step()
    page.count_hop(3, 100, 30_000)
    page.count_hop(1, 50, 60_000_000_000)
    page.end_step()
    page.count(Event.ERROR, "e")
    page.count(Event.REFUSED)
    page.set_weights(10, 4, 6)
    snapshot = page.snapshot()
    seen = series(render(snapshot, snapshot.heartbeat_ns / 1e9 + 2.5))
    assert seen[("afd_hops_total",)] == 2 and seen[("afd_rows_total",)] == 4 and seen[("afd_steps_total",)] == 1
    assert seen[("afd_payload_bytes_total", ("direction", "a2f"))] == 150
    assert seen[("afd_payload_bytes_total", ("direction", "f2a"))] == 150
    assert seen[("afd_errors_total",)] == 1 and seen[("afd_peers_refused_total",)] == 1
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
    for family in text_string_to_metric_families(render(page.snapshot())):
        assert family.name.startswith("afd_") and family.documentation
        for sample in family.samples:
            assert sample.labels["role"] == "attention"


def test_without_a_heartbeat_there_is_no_age():
    assert "heartbeat" not in render(StatusPage.create("ffn").snapshot())


def test_a_ready_server_with_a_fresh_heartbeat_is_healthy(page):
    snapshot = page.snapshot()
    beat = snapshot.heartbeat_ns / 1e9
    assert health(snapshot, beat + 4.9)[0]
    fine, why = health(snapshot, beat + 5.1)
    assert not fine and "no sign of life from its worker 77 for 5.1 s" in why


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.STOPPED])
def test_a_server_that_is_not_ready_is_not_healthy(page, state):
    fine, why = health(dataclasses.replace(page.snapshot(), state=state), 0)
    assert not fine and state.name.lower() in why


def test_a_failed_server_gives_its_reason(page):
    page.fail("no weights")
    assert health(page.snapshot(), 0) == (False, "attention server failed: no weights")


def test_a_ready_server_that_never_beat_is_not_healthy(page):
    fine, why = health(dataclasses.replace(page.snapshot(), heartbeat_ns=0), 1)
    assert not fine and "sign of life" in why


def test_without_a_peer_attention_is_not_healthy_and_the_ffn_is(page):
    snapshot = dataclasses.replace(page.snapshot(), peers=0)
    now = snapshot.heartbeat_ns / 1e9
    fine, why = health(snapshot, now)
    assert not fine and "FFN server is not connected" in why
    assert health(dataclasses.replace(snapshot, role="ffn"), now)[0]
