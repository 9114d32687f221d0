"""A real FFN server: its three processes attest, and one that loses a patch takes the server's readiness away."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import afdpatch
from tests.e2e.conftest import ffn_server
from tests.e2e.driver import rpc
from tests.e2e.servers import MODELS


def get(url: str) -> tuple[int, Any]:
    """Status and JSON."""
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_every_process_attests_and_a_lost_patch_ends_readiness(tmp_path: Path) -> None:
    options = ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27)]
    with ffn_server(MODELS / "qwen3-moe", "bfloat16", tmp_path, *options) as (server, _):
        server.wait_ready(300)
        status, processes = get(f"{server.url}/afd/processes")
        assert status == 200
        by_kind = {kind: item for item in processes for kind in item["processes"]}
        assert by_kind.keys() == {"api", "engine-core", "worker"}
        assert by_kind["api"]["pid"] != by_kind["engine-core"]["pid"]
        assert {item["digest"] for item in processes} == {afdpatch.patchset.digest}
        assert {item["role"] for item in processes} == {"ffn"}
        # vLLM on CPU starts its processes with spawn, whatever it is told.
        assert [by_kind[kind]["start_method"] for kind in ("api", "engine-core", "worker")] == [
            "exec",
            "spawn",
            "spawn",
        ]
        assert by_kind["worker"]["states"]["model.create"] == "applied"
        assert by_kind["engine-core"]["states"]["engine-core.start"] == "applied"
        assert by_kind["api"]["states"]["http.middleware"] == "applied"
        rpc(server.url, "lose_a_patch", True)
        status, body = get(f"{server.url}/health")
        assert status == 503
        assert f"worker (pid {by_kind['worker']['pid']}, spawn): patch 'model.create' is lost" in body["reason"]
        rpc(server.url, "lose_a_patch", False)
        assert get(f"{server.url}/health")[0] == 200
