"""`afdpatch serve` as a process, with a fake in vLLM's place: what it refuses at once, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from afdpatch.cli import checks, main, topology
from afdpatch.cli.servers import Server, children, free_port

from .conftest import Fake, alive, wait_until

WORDS = ["serve", "--role", "ffn", "MODEL", "--enforce-eager"]


def command(fake: Fake, grace: float = 0.6) -> list[str]:
    code = (
        "import os, sys\n"
        "from afdpatch.cli import main, servers, vllm\n"
        f"servers.GRACE_SECONDS = {grace}\n"
        f"vllm.run_vllm = lambda words: os.execv(sys.executable, {fake.command(free_port())!r})\n"
        "sys.exit(main())\n"
    )
    return [sys.executable, "-c", code, *WORDS]


@contextmanager
def serve(fake: Fake, grace: float = 0.6) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command(fake, grace),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # it is ignored below nohup, and inherited
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + 9), (signal.SIGHUP, 128 + 9)]
)
def test_a_server_that_ignores_sigterm_is_gone_after_the_grace_with_its_children(
    fake: Fake, number: int, code: int
) -> None:
    fake.say("stubborn")
    with serve(fake) as process:
        pids = fake.pids()
        assert children(process.pid) == pids[:1]
        process.send_signal(number)
        assert process.wait(30) == code
        assert not any(map(alive, pids))


def test_a_server_that_ends_orderly_has_its_own_exit_code_and_leaves_nothing(fake: Fake) -> None:
    with serve(fake, grace=10) as process:
        pids = fake.pids()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not any(map(alive, pids))


def test_the_exit_code_of_a_server_that_dies_is_kept(fake: Fake) -> None:
    fake.say("die")
    with serve(fake) as process:
        assert process.wait(30) == 3


def test_it_outlives_the_shell_that_started_it(fake: Fake) -> None:
    script = f"import subprocess as s; print(s.Popen({command(fake)!r}, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    started = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    pid = int(started.stdout)
    pids = fake.pids()
    assert children(pid) == pids[:1]
    # A keeper that followed its parent would have ended the server within a second or two of its looks at it.
    status = Path(f"/proc/{pid}/status")
    looks = int(status.read_text().split("voluntary_ctxt_switches:")[1].split()[0])
    wait_until(lambda: int(status.read_text().split("voluntary_ctxt_switches:")[1].split()[0]) >= looks + 4)
    assert alive(pid) and alive(pids[0])
    os.kill(pid, signal.SIGQUIT)
    wait_until(lambda: not any(map(alive, [pid, *pids])))


def test_below_a_keeper_there_is_no_second_one(fake: Fake) -> None:
    with Server("fake", command(fake), free_port(), fake.folder / "log", grace=0.3) as server:
        main_pid = fake.pids()[0]
        assert server.main_pid == main_pid


def test_a_mark_from_further_up_is_no_keeper(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFDPATCH_KEPT", "1")
    with serve(fake) as process:
        pids = fake.pids()
        assert children(process.pid) == pids[:1]


# What is refused before vLLM is imported


REFUSED = [
    ([], "expected a model, found none"),
    (["--port", "8001"], "expected a model, found none"),
    (["--enforce-eager", "--dtype=bfloat16"], "expected a model, found none"),
    (["/no/such/folder"], "/no/such/folder: expected a model's folder with a config.json, found no such folder"),
    (["./nothing"], "./nothing: expected a model's folder with a config.json"),
    (["--port", "8001", "/no/such/folder"], "/no/such/folder: expected a model's folder"),
    (["M", "--grpc"], "--grpc: not supported with a role"),
    (["M", "--afd-port", "70000"], "AFD configuration: port: found 70000"),
    (["M", "--afd-config", '{"conector": "shm"}'], "did you mean 'connector'?"),
    (["M", "--afd-config", '{"connector": "CAMP2pAFDConnector"}'], "needs an Ascend NPU"),
    (["M", "--rank", "1"], "rank: found 1"),
    (["M", "--ffn-ranks", "3", "--ffn-tp", "2"], "ffn_tp: found 2 with num_ffn_ranks 3"),
    (["M", "--connector", "tcp", "--afd-host", "10.0.0.1"], "secret_file: found none with connector 'tcp'"),
    (
        ["M", "--ffn-tp", "2", "--afd-config", '{"connector_extra_config": {"ffn_tp": 1}}'],
        "key 'ffn_tp' is 1 there and 2",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_serve_refuses_at_once_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afdpatch.cli.vllm.run_vllm", lambda words: pytest.fail(f"vLLM was started: {words}"))
    assert main(["serve", "--role", "ffn", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("afdpatch: error: ") and message in line


def test_a_refusal_imports_neither_torch_nor_vllm() -> None:
    code = "import sys\nfrom afdpatch.cli import main\nprint(main(), sorted({'torch', 'vllm'} & set(sys.modules)))\n"
    words = ["serve", "--role", "ffn", "M", "--afd-config", '{"spin": 1}']
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n"


def test_a_folder_with_a_config_and_a_name_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    checks.check_model(str(tmp_path))
    checks.check_model("Qwen/Qwen3-30B-A3B")
    with pytest.raises(checks.UsageError, match="found a folder without one"):
        checks.check_model(str(tmp_path.parent))


@pytest.mark.parametrize(
    "words", [["demo", "--model", "/no/x"], ["bench", "serve", "--model", "/no/x"], ["up", "/no/x"]]
)
def test_the_other_commands_refuse_such_a_model_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "/no/x: expected a model's folder with a config.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["demo", "foo"], ["bench", "serve", "--enforce-eager", "foo"]])
def test_stray_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "unknown argument: foo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["M", "--port", "1", "-tp", "2"], ["M"]),
        (["--enforce-eager", "M"], ["M"]),
        (["--no-enable-prefix-caching", "M", "--seed", "-1"], ["M"]),
        (["-O3", "M"], ["M"]),
        (["--max_model_len=5", "M"], ["M"]),
    ],
)
def test_the_model_is_found_among_options(words: list[str], found: list[str]) -> None:
    assert checks.positionals(words) == found


# What it chooses on a CPU


@pytest.fixture
def vllm_words(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    called: list[list[str]] = []
    monkeypatch.setattr("afdpatch.cli.vllm.run_vllm", lambda words: called.append(list(words)) or 0)
    monkeypatch.setattr(topology, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    monkeypatch.setattr(topology, "physical_cores", list)
    monkeypatch.setenv(topology.BIND, "")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return called


@pytest.mark.parametrize(("role", "cores"), [("attention", "2-3"), ("ffn", "4-5")])
def test_on_a_cpu_the_defaults_are_those_of_up_and_one_line_says_so(
    role: str, cores: str, vllm_words: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--role", role, "M"]) == 0
    (words,) = vllm_words
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert os.environ[topology.BIND] == cores
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("afdpatch: note: KV cache 1 GiB") and f"cores {cores}" in line


def test_settings_of_the_user_are_left_alone_and_nothing_is_said(
    vllm_words: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.BIND, "7")
    assert main(["serve", "--role", "ffn", "M", "--kv-cache-memory-bytes", "5"]) == 0
    assert vllm_words[0].count("--kv-cache-memory-bytes") == 1
    assert os.environ[topology.BIND] == "7"
    assert capsys.readouterr().err == ""
    assert json.loads(vllm_words[0][-1]) == {"afd": {"role": "ffn"}}


def test_the_options_become_the_configuration_beside_the_users_own_keys(vllm_words: list[list[str]]) -> None:
    words = ["serve", "--role", "attention", "M", "--rank", "2", "--attention-ranks", "4", "--ffn-ranks", "2"]
    words += ["--ffn-tp", "1", "--connector", "tcp", "--secret-file", "/s", "--ffn-addresses", "a:1,b:2"]
    assert main([*words, "--afd-config", '{"connector_extra_config": {"merge": false}}']) == 0
    assert json.loads(vllm_words[0][-1])["afd"] == {
        "role": "attention",
        "connector": "tcp",
        "rank": 2,
        "num_attention_ranks": 4,
        "num_ffn_ranks": 2,
        "connector_extra_config": {
            "ffn_tp": 1,
            "ffn_addresses": ["a:1", "b:2"],
            "secret_file": "/s",
            "merge": False,
        },
    }


def test_each_worker_of_a_server_has_cores_of_its_own(vllm_words: list[list[str]]) -> None:
    assert main(["serve", "--role", "ffn", "M", "--tensor-parallel-size", "2"]) == 0
    assert os.environ[topology.BIND] == "4|5"
