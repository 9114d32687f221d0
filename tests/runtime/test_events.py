"""The events: their lines, their limits, their counters."""

import logging

import pytest

from afdpatch.runtime import events
from afdpatch.runtime.events import Event, emit
from afdpatch.runtime.status import StatusPage

log = logging.getLogger("afdpatch.tests.events")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, caplog):
    monkeypatch.setattr(events, "_windows", {})
    caplog.set_level(logging.INFO, "afdpatch")


def test_a_line_is_logfmt_with_its_fields_in_order(caplog):
    emit(log, Event.PEER_LOST, role="attention", rank=0, peer="ffn0", why="the FFN server has gone", after=None)
    assert caplog.messages == ['AFD event=peer_lost role=attention rank=0 peer=ffn0 why="the FFN server has gone"']
    assert caplog.records[0].levelno == logging.WARNING


def test_what_a_stranger_sends_stays_on_one_line_of_ascii(caplog):
    emit(log, Event.DROPPED, why='a\nAFD event=drained "b"\x1b[2J\x7f\u2028', long="x" * 10_000)
    (line,) = caplog.messages
    assert line.isascii() and line.isprintable() and '\\"b\\"' in line and len(line) < 1000


def test_a_flood_of_one_event_is_cut_and_counted_and_others_are_told(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    for _ in range(events.LINES + 30):
        emit(log, Event.DROPPED)
    emit(log, Event.DRAINED)
    assert len(caplog.messages) == events.LINES + 1
    now[0] += events.PERIOD_S
    emit(log, Event.DROPPED)
    assert caplog.messages[-1] == "AFD event=dropped unlogged=30"


def test_every_event_has_a_counter_of_its_own():
    page = StatusPage.create("ffn")
    for number, event in enumerate(Event, 1):
        page.count(event, number=number)
    assert page.snapshot().events == {event: number for number, event in enumerate(Event, 1)}
    assert len({event.counter for event in Event}) == len(Event)
