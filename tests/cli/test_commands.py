"""Arguments: the top level, `serve`, `vllm`."""

import json
import subprocess
import sys
from typing import Any

import pytest

from afdpatch.cli import UsageError, main
from afdpatch.cli.serve import vllm_options


def afd_of(words: list[str]) -> Any:
    assert words[-2] == "--additional-config"
    return json.loads(words[-1])


@pytest.fixture
def vllm_words(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What vLLM's command line would be called with."""
    called: list[list[str]] = []
    monkeypatch.setattr("afdpatch.cli.topology.on_cpu", lambda: False)
    monkeypatch.setattr("afdpatch.cli.vllm.run_vllm", lambda words: called.append(list(words)) or 0)
    return called


def test_serve_becomes_vllm_serve_with_the_role(vllm_words: list[list[str]]) -> None:
    assert main(["serve", "--role", "ffn", "MODEL", "--afd-host", "h", "--afd-port", "12", "--port", "8001"]) == 0
    (words,) = vllm_words
    assert words[:4] == ["serve", "MODEL", "--port", "8001"]
    assert afd_of(words) == {"afd": {"role": "ffn", "host": "h", "port": 12}}


def test_options_go_to_vllm_in_their_order_wherever_the_role_stands(vllm_words: list[list[str]]) -> None:
    main(
        [
            "serve",
            "MODEL",
            "--max-model-len",
            "512",
            "--role=attention",
            "-tp",
            "1",
            "--hf-overrides",
            '{"a": 1}',
            "-O3",
        ]
    )
    (words,) = vllm_words
    assert words[:-2] == ["serve", "MODEL", "--max-model-len", "512", "-tp", "1", "--hf-overrides", '{"a": 1}', "-O3"]
    assert afd_of(words) == {"afd": {"role": "attention"}}


@pytest.mark.parametrize("option", [["--additional-config"], ["--additional_config"]])
def test_the_users_own_additional_config_is_kept(option: list[str]) -> None:
    words = vllm_options({"role": "ffn"}, ["M", *option, '{"x": 1, "afd": {"port": 5}}', "--seed", "1"])
    assert words[:-2] == ["M", "--seed", "1"]
    assert afd_of(words) == {"x": 1, "afd": {"role": "ffn", "port": 5}}
    words = vllm_options({"role": "ffn"}, ["M", f'{option[0]}={{"x": 1}}'])
    assert afd_of(words) == {"x": 1, "afd": {"role": "ffn"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--additional-config", '{"afd": {"role": "attention"}}'], 'key \'role\' is "attention" there and "ffn"'),
        (["--additional-config", '{"a": 1}', "--additional-config", '{"a": 2}'], "key 'a' is 2 there and 1"),
        (["--additional-config", "[1]"], "expected a JSON object, found '[1]'"),
        (["--additional-config", "{"], "expected a JSON object, found '{'"),
        (["--additional-config"], "expected a JSON object, found ''"),
        (["--additional-config", '{"afd": 1}'], "expected an object at key 'afd', found 1"),
        (["--additional-config.afd.role", "ffn"], "--additional-config.afd.role: expected"),
    ],
)
def test_what_cannot_be_merged_is_an_error_that_names_it(options: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        vllm_options({"role": "ffn"}, options)
    assert message in str(caught.value)


def test_afd_config_adds_keys_and_clashes_are_usage_errors(
    vllm_words: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--role", "ffn", "M", "--afd-config", '{"connector": "shm"}']) == 0
    assert afd_of(vllm_words[0]) == {"afd": {"role": "ffn", "connector": "shm"}}
    assert main(["serve", "--role", "ffn", "M", "--afd-port", "5", "--afd-config", '{"port": 6}']) == 2
    assert "--afd-config: key 'port' is 6 there and 5 elsewhere" in capsys.readouterr().err


def test_vllm_gets_its_words_untouched(vllm_words: list[list[str]]) -> None:
    assert main(["vllm", "serve", "M", "--help=x", "--role", "ffn"]) == 0
    assert main(["vllm", "--help"]) == 0
    assert vllm_words == [["serve", "M", "--help=x", "--role", "ffn"], ["--help"]]


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["up", "--help"], ["bench", "--help"]])
def test_help_is_quick_and_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from afdpatch.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'rich', 'torch', 'vllm', 'matplotlib', 'yaml'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: afdpatch" in done.stdout
    assert done.stderr.strip() == "[]"


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["nonsense"], ["serve", "M"], ["bench"], ["bench", "nonsense"], ["serve", "--role", "x"]]
)
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2


def test_errors_of_the_registry_bring_their_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Drifted(Exception):
        exit_code = 4

    def fail(words: list[str]) -> int:
        raise Drifted("the target has changed")

    monkeypatch.setattr("afdpatch.cli.vllm.run_vllm", fail)
    monkeypatch.setattr("afdpatch.cli.topology.on_cpu", lambda: False)
    assert main(["serve", "--role", "ffn", "M"]) == 4
    assert capsys.readouterr().err == "afdpatch: error: the target has changed\n"
