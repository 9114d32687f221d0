"""An AFD pair as users have it: two HTTP servers."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from afdpatch.cli.servers import Server, free_port, get_status, port_is_free, wait_all
from afdpatch.cli.topology import afd_pair
from tests.e2e.conftest import metrics
from tests.e2e.servers import (
    LAYERS,
    MODEL,
    OPTIONS,
    PROMPT,
    ask,
    processes_below,
    rows_are_alike,
    said,
    same,
    stream,
    until,
)

REQUESTS = {
    "greedy": {},
    "several choices with a seed": {"n": 3, "temperature": 0.8, "seed": 7},
    "stop string": {"stop": ["object"]},
    "a long prompt": {"prompt": PROMPT * 40},
    "echo": {"echo": True, "max_tokens": 1},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_completions_are_those_of_stock_vllm(pair: tuple[Server, Server], alone: Server, name: str) -> None:
    attention, ffn = pair
    before = hops_when_idle(attention, ffn)
    status, answer = ask(attention, **REQUESTS[name])
    assert status == 200
    expected = said(ask(alone, **REQUESTS[name])[1])
    assert [text for text, *_ in said(answer)] == [text for text, *_ in expected]
    # Choices may enter the batch in one step or in two.
    assert same(said(answer), expected, len(expected) == 1 or rows_are_alike(ffn))
    assert hops_when_idle(attention, ffn) >= before + LAYERS * answer["usage"]["completion_tokens"] / len(
        answer["choices"]
    )


def hops_when_idle(attention: Server, ffn: Server) -> float:
    """The hops that the FFN server counted, once they are those of all steps (one runs on after a stop)."""

    def settled() -> float | None:
        hops, steps = metrics(ffn.url)["afd_hops_total"], metrics(attention.url)["afd_steps_total"]
        return hops if hops == LAYERS * steps and _running(attention) == 0 else None

    found: float = until(lambda: [settled()] if settled() is not None else None, 20, "four hops for each step")[0]
    return found


def test_streaming_and_hanging_up_in_mid_stream(pair: tuple[Server, Server], alone: Server) -> None:
    expected = stream(alone)
    assert len(expected) == 48
    assert stream(pair[0]) == expected
    assert stream(pair[0], stop_after=5) == expected[:5]
    until(
        lambda: b"vllm:num_requests_running" in _metrics(pair[0]) and _running(pair[0]) == 0, 20, "no request is left"
    )
    assert stream(pair[0]) == expected


def _metrics(server: Server) -> bytes:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        return bytes(response.read())


def _running(server: Server) -> float:
    lines = [line for line in _metrics(server).decode().splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_zeroed_ffns_give_other_tokens(pair: tuple[Server, Server]) -> None:
    from tests.e2e.driver import rpc

    attention, ffn = pair
    before = said(ask(attention)[1])
    rpc(ffn.url, "zero_ffn", True)
    try:
        zeroed = said(ask(attention)[1])
    finally:
        rpc(ffn.url, "zero_ffn", False)
    assert zeroed[0][0] != before[0][0]
    assert said(ask(attention)[1]) == before


def test_metrics_of_both_roles_stand_beside_vllms(pair: tuple[Server, Server]) -> None:
    ask(pair[0])
    hops_when_idle(*pair)
    attention, ffn = metrics(pair[0].url), metrics(pair[1].url)
    assert b"vllm:" in _metrics(pair[0])
    assert attention["afd_hops_total"] == ffn["afd_hops_total"] > 0
    assert attention["afd_payload_bytes_total{a2f}"] == ffn["afd_payload_bytes_total{a2f}"] > 0
    assert attention["afd_last_step_hops"] == LAYERS
    assert attention["afd_peer_up"] == ffn["afd_peer_up"] == 1
    assert attention["afd_step_seconds_count"] == attention["afd_steps_total"] == ffn["afd_steps_total"]
    assert ffn["afd_ffn_compute_seconds_count"] == ffn["afd_hops_total"]
    assert attention["afd_weight_bytes"] + ffn["afd_weight_bytes"] == 5521792


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/embeddings", "/nothing"]
)
def test_the_ffn_server_refuses_requests_and_says_where_to_send_them(pair: tuple[Server, Server], path: str) -> None:
    status, answer = ask(pair[1], path)
    assert status == 421
    assert "attention server" in answer["error"]["message"]
    until(lambda: get_status("127.0.0.1", pair[1].port, "/health") == 200, 30, "/health is 200 all the same")


def test_the_ffn_servers_health_follows_its_loop(pair: tuple[Server, Server]) -> None:
    ffn = pair[1]
    worker = int(metrics(ffn.url)["afd_worker_pid"])
    os.kill(worker, signal.SIGSTOP)
    try:
        until(
            lambda: get_status("127.0.0.1", ffn.port, "/health") == 503, 20, "/health 503 while the loop stands still"
        )
    finally:
        os.kill(worker, signal.SIGCONT)
    until(lambda: get_status("127.0.0.1", ffn.port, "/health") == 200, 20, "/health 200 when it goes on")
    assert ask(pair[0])[0] == 200


def leftovers(afd_port: int) -> set[str]:
    """Names of shared memory segments, and of the sockets of a pair, on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    sockets = {line.split()[-1] for line in lines if "@afdpatch" in line and f":{afd_port}/" in line}
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} | sockets


def test_sigterm_leaves_nothing_and_the_same_ports_work_again(tmp_path: Path) -> None:
    taken: list[int] = []
    for _ in range(3):
        taken.append(free_port(taken))
    ports = dict(zip(("port", "ffn_port", "afd_port"), taken, strict=True))
    before = leftovers(ports["afd_port"])
    for round_ in ("first", "second"):
        attention, ffn = afd_pair(OPTIONS, tmp_path / round_, **ports)
        with ffn, attention:
            wait_all([attention, ffn], 300)
            assert ask(attention)[0] == 200
            assert any("@afdpatch" in name for name in leftovers(ports["afd_port"]) - before)
            mains = [server.main_pid for server in (attention, ffn)]
            alive = {pid for server in (attention, ffn) for pid in processes_below(server.pid)}
            for main in mains:
                assert main is not None
                os.kill(main, signal.SIGTERM)
            for server in (attention, ffn):
                code = until(
                    lambda server=server: [server.exit_code] if server.exit_code is not None else None, 30, "an end"
                )
                assert code == [0], server.log.path.read_text()[-2000:]
                # vLLM's API server may hear of its EngineCore's end before it has put its own handler away.
                log = server.log.path.read_text()
                assert log.count("Traceback") == log.count("AsyncLLM output_handler failed.")
                assert "afdpatch/" not in log.partition("shutdown triggered")[2]
        # Not even a zombie: each server's keeper has collected whatever was below it.
        assert not [pid for pid in alive if Path(f"/proc/{pid}").exists()]
        assert all(port_is_free(port) for port in ports.values())
        assert leftovers(ports["afd_port"]) <= before


@pytest.mark.parametrize("victim", ["attention", "ffn"])
def test_a_killed_worker_ends_its_server_and_the_other_says_so(tmp_path: Path, victim: str) -> None:
    attention, ffn = afd_pair(OPTIONS, tmp_path)
    with ffn, attention:
        wait_all([attention, ffn], 300)
        assert ask(attention)[0] == 200
        server, other = (attention, ffn) if victim == "attention" else (ffn, attention)
        os.kill(int(metrics(server.url)["afd_worker_pid"]), signal.SIGKILL)
        until(
            lambda: get_status("127.0.0.1", server.port, "/health") != 200,
            60,
            f"/health of the {victim} server not 200",
        )
        until(lambda: server.exit_code is not None, 60, f"the {victim} server ends")
        if victim == "ffn":
            until(lambda: get_status("127.0.0.1", other.port, "/health") == 503, 60, "503 at the attention server")
        else:
            until(lambda: metrics(other.url)["afd_peers"] == 0, 60, "the FFN server has no peer")
            until(lambda: get_status("127.0.0.1", other.port, "/health") == 200, 30, "/health is 200 all the same")


def test_plain_vllm_with_the_plugin_alone(tmp_path: Path) -> None:
    """No import of afdpatch by the user: vLLM's own server module, additional_config and the entry point."""
    port = free_port()
    config = json.dumps({"afd": {"afd_role": "ffn", "port": free_port()}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *OPTIONS]
    server = Server("plain", [*command, "--port", str(port), "--additional-config", config], port, tmp_path / "log")
    server.env |= {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    with server:
        server.wait_ready(300)
        assert metrics(server.url)["afd_weight_bytes"] == 3551232
        assert ask(server)[0] == 421


def test_plain_vllm_after_a_server_with_afd_in_one_process() -> None:
    """A notebook that configures an AFD server and then runs vLLM by itself, EngineCore in a process of its own."""
    code = """
import sys, afdpatch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
if __name__ == "__main__":
    EngineArgs(model=sys.argv[1], additional_config={"afd": {"role": "ffn"}}).create_engine_config()
    assert afdpatch.patchset.states()["engine-core.start"].value == "applied"
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 27)
    outputs = llm.generate("The :func:`open` function returns", SamplingParams(temperature=0, max_tokens=4))
    print("SAID" + outputs[0].outputs[0].text)
"""
    done = subprocess.run([sys.executable, "-c", code, str(MODEL)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "SAID a file object" in done.stdout


def test_with_afd_off_no_symbol_is_changed_but_the_always_on() -> None:
    """A census of every function in vLLM's loaded modules and classes: whose code is not vLLM's own?"""
    code = """
import sys, types, afdpatch
from vllm.engine.arg_utils import EngineArgs
import vllm.entrypoints.cli.main, vllm.entrypoints.launchers.app, vllm.v1.worker.cpu_worker, vllm.v1.engine.core
import vllm.model_executor.models.qwen3_moe, vllm.model_executor.model_loader.default_loader
EngineArgs(model=sys.argv[1]).create_engine_config()
for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"]:
    for owner in [module, *(v for v in vars(module).values() if issubclass(type(v), type))]:
        for name, value in list(vars(owner).items()):
            value = value.__func__ if type(value) in (staticmethod, classmethod) else value
            if type(value) is types.FunctionType and "/patches/" in value.__code__.co_filename:
                print(f"FOUND {owner.__name__}.{name}")
"""
    done = subprocess.run([sys.executable, "-c", code, str(MODEL)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FOUND ")}
    assert found == {"EngineArgs.create_engine_config"}
