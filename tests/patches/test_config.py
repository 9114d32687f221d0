"""The config seam on real vLLM configurations: what is refused, with which words, and what a role comes up as."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from afdpatch.patches.features import CHECKS
from afdpatch.patches.models import tables
from afdpatch.patches.settings import AfdSettings
from afdpatch.runtime.config import AfdConfig

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
pytestmark = pytest.mark.e2e


def case(
    afd: Any = None,
    env: dict[str, str] | None = None,
    headless: bool = False,
    additional: dict[str, Any] | None = None,
    argv: list[str] | None = None,
    modules: list[str] | None = None,
    **args: Any,
) -> dict[str, Any]:
    """One configuration of qwen3-moe."""
    base = {"model": str(MODELS / "qwen3-moe"), "enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
    additional = {"afd": afd} if afd is not None else additional
    more = {} if additional is None else {"additional_config": additional}
    return {
        "args": base | args | more,
        "env": env or {},
        "headless": headless,
        "argv": argv or [],
        "modules": modules or [],
    }


ATTENTION = {"role": "attention"}
FFN = {"role": "ffn"}
TWO_RANKS = {"role": "attention", "num_attention_ranks": 2}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    # name: (case, words that must stand in the one line); exit code 2
    "unknown key": (case({"rolle": "ffn"}), ["'rolle'", "did you mean 'role'"]),
    "not a mapping": (case("attention"), ["afd", "'attention'"]),
    "wrong type": (case({"role": "ffn", "port": True}), ["port", "True", "1 to 65535"]),
    "count below one": (case({"num_ffn_ranks": 0}), ["num_ffn_ranks", "0"]),
    "port out of range": (case({"port": 70000}), ["port", "70000"]),
    "alias beside its key": (case({"role": "ffn", "afd_role": "ffn"}), ["role, afd_role"]),
    "unknown role": (case({"role": "Attention"}), ["role", "'Attention'", "attention or ffn"]),
    "NPU connector": (case({"connector": "CAMP2pAFDConnector"}), ["CAMP2pAFDConnector", "Ascend NPU"]),
    "unknown connector": (case({"connector": "pigeon"}), ["pigeon", "shm"]),
    "more workers than ranks": (
        case({"role": "attention", "num_attention_ranks": 3, "rank": 2}, data_parallel_size=2),
        ["num_attention_ranks", "2 workers", "from rank 2", "at least 4"],
    ),
    "tensor parallelism without its ranks": (
        case(ATTENTION, tensor_parallel_size=2, distributed_executor_backend="mp"),
        ["num_attention_ranks", "tensor parallel 2", "at least 2"],
    ),
    "a group that waits less than a hop": (
        case(
            TWO_RANKS | {"connector_extra_config": {"connect_timeout_s": 60, "recovery_timeout_s": 120}},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            distributed_timeout_seconds=120,
        ),
        ["--distributed-timeout-seconds", "120 with --tensor-parallel-size 2", "recovery_timeout_s", "more than 120 s"],
    ),
    "a group that waits less than a start": (
        case(
            TWO_RANKS,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            cpu_distributed_timeout_seconds=300,
        ),
        ["--cpu-distributed-timeout-seconds", "300 with", "connect_timeout_s 600", "more than 600 s"],
    ),
    "a start longer than PyTorch's groups wait": (
        case(
            TWO_RANKS | {"connector_extra_config": {"connect_timeout_s": 3600}},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        ),
        ["--distributed-timeout-seconds", "none, which is 1800,", "more than 3600 s"],
    ),
    "an FFN server of another tensor-parallel size": (
        case({"role": "ffn", "num_ffn_ranks": 2}, tensor_parallel_size=2, distributed_executor_backend="mp"),
        ["ffn_tp", "--tensor-parallel-size 2"],
    ),
    "an FFN server that starts within another": (
        case({"role": "ffn", "num_ffn_ranks": 4, "rank": 1, "connector_extra_config": {"ffn_tp": 2}}),
        ["ffn_tp", "rank 1", "0, 2"],
    ),
    "another scheduler class": (
        case(ATTENTION, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"),
        ["--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler", "AfdScheduler"],
    ),
    "transport": (case({"connector": "ipc"}), ["a connector of another device", "ipc on cpu"]),
    "gate-on-attention": (case({"compute_gate_on_attention": True}), ["compute_gate_on_attention"]),
    "ffn-data-parallel": (case(FFN, data_parallel_size=2), ["data parallelism of an FFN server", "2", "rank"]),
    "load-balancing": (
        case(ATTENTION, data_parallel_size=2, data_parallel_rank=1, data_parallel_size_local=1),
        ["load balancing", "external"],
    ),
    "several-nodes": (
        case(TWO_RANKS, data_parallel_size=2, data_parallel_size_local=1, data_parallel_address="127.0.0.1"),
        ["several nodes", "--data-parallel-size-local 1 of --data-parallel-size 2", "--headless", "each with its rank"],
    ),
    "tensor parallelism over several nodes": (
        case(TWO_RANKS, tensor_parallel_size=2, nnodes=2, node_rank=0, distributed_executor_backend="mp"),
        ["several nodes", "--nnodes 2"],
    ),
    "pipeline-parallel": (case(ATTENTION, pipeline_parallel_size=2, distributed_executor_backend="mp"), ["pipeline"]),
    "expert-parallel": (case(ATTENTION, enable_expert_parallel=True), ["expert parallelism"]),
    "micro-batches": (case(ATTENTION, ubatch_size=2), ["dual-batch overlap", "2"]),
    "eplb": (case(ATTENTION, enable_eplb=True, enable_expert_parallel=True), ["EPLB"]),
    "context-parallel": (case(ATTENTION, decode_context_parallel_size=2), ["context parallelism", "2"]),
    "dual-batch overlap": (case(ATTENTION, enable_dbo=True), ["dual-batch overlap"]),
    "load-strategy": (case(ATTENTION, safetensors_load_strategy="eager"), ["--safetensors-load-strategy", "eager"]),
    "model-impl": (case(ATTENTION, model_impl="transformers"), ["--model-impl", "transformers"]),
    "grpc": (case(ATTENTION, argv=["--grpc"]), ["--grpc", "HTTP seam"]),
    "grpc that isn't on the command line": (
        case(ATTENTION, modules=["vllm.entrypoints.launchers.grpc_server"]),
        ["--grpc", "vllm.entrypoints.launchers.grpc_server", "HTTP seam"],
    ),
    "a checkpoint without safetensors": (case(ATTENTION, model="no-safetensors"), ["*.safetensors"]),
    "AFD's key in capitals": (case(additional={"AFD": ATTENTION}), ["AFD", 'under the key "afd"']),
    "AFD's keys one level too high": (case(additional={"afd_role": "ffn"}), ["afd_role", 'under the key "afd"']),
    "a hop deadline beyond vLLM's": (
        case(ATTENTION, env={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "10"}),
        ["hop_timeout_s", "10"],
    ),
    "quantisation": (case(ATTENTION, quantization="fp8"), ["quantised", "fp8"]),
    "lora": (case(ATTENTION, enable_lora=True), ["LoRA"]),
    "speculative": (
        case(ATTENTION, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}),
        ["speculative decoding", "ngram"],
    ),
    "kv-transfer": (
        case(ATTENTION, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
        ["KV transfer"],
    ),
    "load-format": (case(ATTENTION, load_format="sharded_state"), ["load formats", "sharded_state"]),
    "load-threads": (case(ATTENTION, model_loader_extra_config={"enable_multithread_load": True}), ["multi-threaded"]),
    "rust-front-end": (case(ATTENTION, env={"VLLM_USE_RUST_FRONTEND": "1"}), ["Rust front end"]),
    "headless": (case(ATTENTION, headless=True), ["--headless"]),
    "api-servers": (case(ATTENTION, _api_process_count=2), ["several API server", "2", "--api-server-count 1"]),
    "cpu-offload": (case(ATTENTION, offload_group_size=2), ["weight offloading"]),
    "weight-transfer": (case(ATTENTION, weight_transfer_config={"backend": "ipc"}), ["weight transfer"]),
    "sleep-mode": (case(ATTENTION, enable_sleep_mode=True), ["sleep mode", "--enable-sleep-mode"]),
    "sleep mode of an FFN server": (case(FFN, enable_sleep_mode=True), ["sleep mode", "--enable-sleep-mode"]),
    "pooling": (case(ATTENTION, runner="pooling"), ["pooling and embedding models"]),
    "routed-experts": (case(ATTENTION, enable_return_routed_experts=True), ["return-routed-experts"]),
    "prefix caching at the FFN": (case(FFN, enable_prefix_caching=True), ["--enable-prefix-caching", "no KV cache"]),
    "another worker class": (
        case(FFN, worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"),
        ["--worker-cls", "CPUWorker"],
    ),
    "the other role's worker": (
        case(FFN, worker_cls="afdpatch.patches.worker_cpu.AttentionWorker"),
        ["--worker-cls", "role ffn"],
    ),
    "unknown architecture": (
        case(ATTENTION, hf_overrides={"architectures": ["Qwen2MoeForCausalLM"]}),
        ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"],
    ),
}
ACCEPTED = {
    "off": case(),
    "attention": case(ATTENTION),
    "attention elsewhere": case({"role": "attention", "host": "10.0.0.7", "port": 9999}),
    "ffn": case(FFN),
    "data-parallel attention": case({"role": "attention", "num_attention_ranks": 2}, data_parallel_size=2),
    "tensor-parallel attention": case(
        {"role": "attention", "num_attention_ranks": 3, "rank": 1, "num_ffn_ranks": 3},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ),
    "a scheduler of the user's own": case(ATTENTION, scheduler_cls="afdpatch.patches.scheduler.AfdAsyncScheduler"),
    "started by another server": case(
        FFN, env={"AFDPATCH_STATUS_PAGE": "/proc/1/fd/0", "AFDPATCH_ROLL": "/proc/1/fd/0"}
    ),
    "afd-plugin's words": case(
        {
            "afd_role": "attention",
            "afd_connector": "P2pNcclAFDConnector",
            "afd_host": "127.0.0.1",
            "afd_port": "1239",
            "num_attention_ranks": 1,
            "num_ffn_ranks": 1,
            "compute_gate_on_attention": False,
            "connector_extra_config": {},
        }
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case's outcome, from one process."""
    folder = tmp_path_factory.mktemp("refusals")
    shutil.copytree(MODELS / "qwen3-moe", folder / "no-safetensors", ignore=shutil.ignore_patterns("*.safetensors"))
    cases = {name: refused for name, (refused, _) in REFUSED.items()} | ACCEPTED
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.refusals", "cases.json", "out.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_afd_does_not_take_ends_with_code_2_and_one_clear_line(outcomes: dict[str, Any], name: str) -> None:
    found = outcomes[name]
    assert found["code"] == 2, found
    lines = [line for line in found["message"].splitlines() if line.startswith("afdpatch: ")]
    assert len(lines) == 1
    for word in REFUSED[name][1]:
        assert word in lines[0]


def test_every_refused_feature_of_the_table_has_a_check_and_every_check_a_row() -> None:
    assert CHECKS.keys() == tables().refused.keys()


def test_every_check_was_seen_to_refuse() -> None:
    untested = {
        "device",  # this host has CPUs only
        "sequence-parallel",  # needs TP, DP and EP, each refused before
        "multimodal",  # no row of the model table is multimodal
        "executor",  # Ray isn't installed
        "piecewise-graphs",  # of GPUs, as the next two
        "gpu-tensor-parallel",
        "gpu-data-parallel",
        "runner-v2",  # vLLM refuses it on a CPU without Triton first
    }
    assert CHECKS.keys() - REFUSED.keys() == untested


def test_with_afd_off_nothing_of_afd_is_in_the_configuration(outcomes: dict[str, Any]) -> None:
    found = outcomes["off"]
    assert (found["settings"], found["page"]) == ("{}", None)
    assert found["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_each_role_comes_up_with_its_worker_and_a_status_page(outcomes: dict[str, Any]) -> None:
    assert outcomes["attention"]["worker"] == "afdpatch.patches.worker_cpu.AttentionWorker"
    assert outcomes["attention"]["prefix_caching"] is True
    assert outcomes["ffn"]["worker"] == "afdpatch.patches.worker_cpu.FFNWorker"
    assert outcomes["ffn"]["prefix_caching"] is False
    assert outcomes["ffn"]["page"].startswith("/proc/")
    assert outcomes["afd-plugin's words"]["worker"] == outcomes["attention"]["worker"]


def test_attention_has_the_scheduler_that_knows_lost_steps_and_the_ffn_server_vllms(outcomes: dict[str, Any]) -> None:
    assert outcomes["attention"]["scheduler"] == "afdpatch.patches.scheduler.AfdScheduler"
    assert outcomes["a scheduler of the user's own"]["scheduler"] == "afdpatch.patches.scheduler.AfdAsyncScheduler"
    assert outcomes["ffn"]["scheduler"] == outcomes["off"]["scheduler"] == "None"


def test_data_parallel_attention_ranks_are_started_as_those_of_a_dense_model(outcomes: dict[str, Any]) -> None:
    assert outcomes["data-parallel attention"]["is_moe"] == [False, False]
    for name in ("attention", "tensor-parallel attention", "ffn", "off"):
        assert outcomes[name]["is_moe"] == [True, True]


def test_a_page_that_was_inherited_from_another_server_is_not_taken(outcomes: dict[str, Any]) -> None:
    page = outcomes["started by another server"]["page"]
    assert page.startswith("/proc/")
    assert page != "/proc/1/fd/0"


def test_the_compile_hash_holds_the_role_and_no_host_or_port(outcomes: dict[str, Any]) -> None:
    hashes = {name: outcomes[name]["hash"] for name in ("off", "attention", "attention elsewhere", "ffn")}
    assert hashes["attention"] == hashes["attention elsewhere"]
    assert len(set(hashes.values())) == 3


def test_settings_survive_pickling_and_copying_and_leave_the_link_behind() -> None:
    settings = AfdSettings(AfdConfig.parse(FFN), tables().models["Qwen3MoeForCausalLM"], "d" * 64, {"other": 1})
    settings.link = object()
    again = pickle.loads(pickle.dumps(settings))
    assert (again.role, again.digest, again.get("other"), again.link) == ("ffn", "d" * 64, 1, None)
    assert again.compute_hash() == settings.compute_hash()
    assert deepcopy(settings) is settings
