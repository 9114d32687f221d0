"""requirements/environment.py: Pythons that can't be used, and what is said when pip fails."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "requirements" / "environment.py"


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment_steps", SCRIPT.with_name("environment_steps.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def old_python() -> str | None:
    """A Python that can't read today's syntax, where this machine has one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = (str(path) for version in ("2.7*", "3.6*") for path in pyenv.glob(f"{version}/bin/python"))
    return next(installed, None) or shutil.which("python2.7") or shutil.which("python3.6")


def test_an_old_python_is_refused_in_one_line() -> None:
    if (python := old_python()) is None:
        pytest.skip("no Python 2.7 or 3.6 here")
    done = subprocess.run([python, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "expected Python 3.10 to 3.13" in line


def as_version(version: str, path: str) -> "subprocess.CompletedProcess[str]":
    code = (
        "import runpy, sys\n"
        f"sys.version_info = {version}\n"
        f"sys.argv = [{str(SCRIPT)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": path, "HOME": "/nowhere"}
    )


def test_the_guard_needs_no_old_python_to_be_tried(tmp_path: Path) -> None:
    done = as_version("(3, 6, 15)", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected Python 3.10 to 3.13" in done.stderr


def test_going_on_with_another_python_is_said(tmp_path: Path) -> None:
    other = tmp_path / "python3.12"
    other.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "went on: $1"\n')
    other.chmod(0o755)
    done = as_version("(3, 9, 18)", str(tmp_path))
    assert done.returncode == 0, done.stderr
    said, went_on = done.stdout.splitlines()
    assert said == f"Python 3.9 isn't one that vLLM runs on: going on with {other}"
    assert went_on == f"went on: {SCRIPT}"


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--venv", "/proc/x"], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: /proc/x can't be made: ")


def fake_venv(folder: Path, script: str) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "python").chmod(0o755)
    return folder


def test_without_a_network_pips_error_says_so_and_leaves_out_other_systems_pins(
    tmp_path: Path, steps: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "Ignoring colorama: markers 'sys_platform == \"win32\"' don't match your environment\n"
        "WARNING: Retrying after connection broken by NewConnectionError: Name or service not known\n"
        "ERROR: No matching distribution found for torch"
    )
    venv = fake_venv(tmp_path, f"cat <<'END'\n{said}\nEND\nexit 1")
    with pytest.raises(steps.Failed) as caught:
        steps.pip_install(venv, [], expected=1)
    text = str(caught.value)
    assert text.startswith("no network? pip failed (exit code 1)")
    assert "Ignoring" not in text and "No matching distribution found for torch" in text


def test_pip_ends_when_what_started_it_is_killed(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path, f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 600")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import environment_steps as steps\nfrom pathlib import Path\n"
        f"steps.pip_install(Path({str(venv)!r}), [], expected=1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(pid), 10)
