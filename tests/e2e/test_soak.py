"""Two minutes of the soak, with two faults; docs/bench/soak.json has half an hour of it."""

from pathlib import Path

import pytest

from tests.e2e.soak import soak


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_minutes_of_load_and_faults_give_every_request_its_tokens(tmp_path: Path) -> None:
    report = soak(2, tmp_path, every=60, threads=4, think_s=1)
    requests = report["requests"]
    assert requests["wrong"] == []
    assert requests["lost"] == []
    assert requests["right"] == requests["asked"] > 50
    assert report["bench_client"]["failed"] == 0
    assert report["bench_client"]["completed"] > 0
    assert len(report["faults"]) >= 1
    assert report["counters"]["attention0"]["hops_repeated"] + report["counters"]["attention1"]["hops_repeated"] > 0
