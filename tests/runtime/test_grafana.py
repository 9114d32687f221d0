"""The dashboard asks only for what the servers tell, and shows every event."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from afdpatch.runtime.events import Event
from afdpatch.runtime.metrics import render
from afdpatch.runtime.status import Peer, StatusPage

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "afdpatch.json"


def asked():
    """Each expression of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${source}"
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def told():
    """Each series' name that a server tells, with its labels."""
    page = StatusPage.create("attention")
    page.beat()
    page.name_peers([Peer(0, 1, 1)])
    families = text_string_to_metric_families(render([page.snapshot()]))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_metric_of_the_dashboard_is_one_that_a_server_tells():
    names = {name for expression in asked() for name in re.findall(r"\bafd_\w+", expression)}
    assert len(names) > 20 and names <= set(told())


def test_labels_that_a_panel_shows_are_labels_of_its_series():
    series = told()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"instance"}
            for name in re.findall(r"\bafd_\w+", target["expr"]):
                assert shown <= series[name], (panel["title"], name)


def test_every_event_is_on_the_dashboard():
    text = " ".join(asked())
    assert [event for event in Event if f"afd_{event.counter}_total" not in text] == []
    assert len({panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]}) > 10
