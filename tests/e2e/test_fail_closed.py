"""A server whose patches can't be applied whole doesn't come up, and never as plain vLLM."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from afdpatch.cli.servers import free_port
from tests.e2e.servers import MODELS

BASE_LOADER = "model_executor/model_loader/base_loader.py"
CHANGES = {
    # name: (file, old, new, exit code, words)
    "one line of a target's body changed": (
        BASE_LOADER,
        "log_model_inspection(model)\n        return model",
        "log_model_inspection(model)\n        print()\n        return model",
        4,
        ["model.create", "BaseModelLoader.create_model"],
    ),
    "a target gone": (
        BASE_LOADER,
        "def create_model(",
        "def make_model(",
        3,
        ["model.create", "BaseModelLoader.create_model"],
    ),
    "the always-on target changed": (
        "engine/arg_utils.py",
        "current_platform.pre_register_and_update()\n",
        "current_platform.pre_register_and_update() or None\n",
        4,
        ["config.engine-args", "EngineArgs.create_engine_config"],
    ),
}


@pytest.fixture
def vllm_copy(tmp_path: Path) -> Path:
    """A folder that holds a copy of the installed vLLM, of links to its files."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    for folder, _, files in os.walk(package):
        there = tmp_path / "copy" / "vllm" / Path(folder).relative_to(package)
        there.mkdir(parents=True)
        for name in files:
            if not name.endswith(".pyc"):
                (there / name).symlink_to(Path(folder) / name)
    return tmp_path / "copy"


def edit(copy: Path, file: str, old: str, new: str) -> None:
    """Change a file of the copy."""
    path = copy / "vllm" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.unlink()
    path.write_text(text.replace(old, new))


def serve(copy: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Start an attention server on the copy; it must end by itself."""
    afd = json.dumps({"afd": {"role": "attention", "port": free_port()}})
    options = ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27), "--port", str(free_port())]
    return subprocess.run(
        [sys.executable, *command, str(MODELS / "qwen3-moe"), "--additional-config", afd, *options],
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )


STARTS = {
    "afdpatch": ["-m", "afdpatch", "vllm", "serve"],
    "the plug-in alone": ["-m", "vllm.entrypoints.openai.api_server", "--model"],
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_vllm_ends_the_server_before_weights_load(vllm_copy: Path, name: str, start: str) -> None:
    file, old, new, code, words = CHANGES[name]
    edit(vllm_copy, file, old, new)
    done = serve(vllm_copy, *STARTS[start])
    output = done.stdout + done.stderr
    # The plug-in can only raise in vLLM's own import, which ends with Python's exit code.
    through_import = start == "the plug-in alone" and name == "the always-on target changed"
    assert done.returncode == (1 if through_import else code), output[-3000:]
    for word in words:
        assert word in output
    assert "Starting to load model" not in output
    assert "Application startup complete" not in output


def test_comments_and_docstrings_do_not_count(vllm_copy: Path) -> None:
    edit(
        vllm_copy,
        BASE_LOADER,
        '"""Create a model with the given configurations."""',
        '"""Another text."""  # and a comment',
    )
    done = subprocess.run(
        [sys.executable, "-m", "afdpatch", "verify"],
        env={**os.environ, "PYTHONPATH": str(vllm_copy)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CHANGES)
def test_verify_names_patch_symbol_expected_and_found(vllm_copy: Path, name: str) -> None:
    file, old, new, code, words = CHANGES[name]
    edit(vllm_copy, file, old, new)
    for form in ("text", "json"):
        done = subprocess.run(
            [sys.executable, "-m", "afdpatch", "verify", "--format", form],
            env={**os.environ, "PYTHONPATH": str(vllm_copy)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout + done.stderr
        for word in (*words, "expected", "found"):
            assert word in done.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "expected the installed package, found {folder}"),
        ("import nobody_has_this", "nobody_has_this"),
        ("raise SystemExit", "{folder}/__init__.py"),
    ],
    ids=["the folder above a clone", "what it needs isn't installed", "a script of the same name"],
)
def test_vllm_does_not_start_where_afdpatch_cannot_be_imported(tmp_path: Path, source: str | None, words: str) -> None:
    folder = tmp_path / "afdpatch"
    folder.mkdir()
    if source is not None:
        (folder / "__init__.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", "from vllm import plugins; plugins.load_general_plugins(); print('started')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "started" not in done.stdout, done.stdout + done.stderr
    assert words.format(folder=folder) in done.stderr


def test_another_release_is_refused_with_code_8(vllm_copy: Path) -> None:
    edit(vllm_copy, "_version.py", "__version__ = version = '0.30.0'", "__version__ = version = '0.31.0'")
    done = subprocess.run(
        [sys.executable, "-m", "afdpatch", "verify"],
        env={**os.environ, "PYTHONPATH": str(vllm_copy)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 8, done.stdout + done.stderr
    assert "0.31.0" in done.stdout
    assert "0.30.0" in done.stdout
