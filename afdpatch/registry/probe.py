"""Asks the `remove_when` functions, in a process of their own: they may import the package, and need it unpatched.

`python -m afdpatch.registry.probe FILE NAME...` writes a JSON object: for each name true, false or an error's text.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from afdpatch.registry.manifest import Entry

TIMEOUT_S = 600


def run_probes(entries: Iterable[Entry]) -> dict[str, bool | str]:
    """Asks each entry's `remove_when`, all in one other process.

    Returns:
        For each entry that has one: true if the entry is obsolete, false if not, or why that is not known.
    """
    names = {entry.id: entry.remove_when for entry in entries if entry.remove_when}
    if not names:
        return {}
    # The answer goes through a file: the package may print what it likes.
    with tempfile.TemporaryDirectory(prefix="afdpatch-probe-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", "afdpatch.registry.probe", str(answer), *dict.fromkeys(names.values())]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(names, f"no answer in {TIMEOUT_S} s")
        if not answer.is_file():
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return dict.fromkeys(names, f"the probe's process ended with {done.returncode}: {last}")
        results: dict[str, bool | str] = json.loads(answer.read_text(encoding="utf-8"))
    return {entry_id: results[name] for entry_id, name in names.items()}


def main(arguments: Sequence[str]) -> None:
    """Asks the functions that are named, and writes the answers to the file that comes first."""
    answer, *names = arguments
    results = {name: _ask(name) for name in names}
    temporary = Path(f"{answer}.{os.getpid()}")
    temporary.write_text(json.dumps(results), encoding="utf-8")
    temporary.replace(answer)


def _ask(name: str) -> bool | str:
    module, _, qualname = name.partition(":")
    try:
        _disarm(module.partition(".")[0])
        value: object = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
        result = value() if callable(value) else value
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, bool) else f"{name} returned {result!r}, not true or false"


def _disarm(package: str) -> None:
    """Takes back what the import of a package armed: a probe must see the original."""
    from afdpatch.registry.patchset import PatchSet

    for value in list(vars(importlib.import_module(package)).values()):
        if isinstance(value, PatchSet):
            value.undo()


if __name__ == "__main__":
    main(sys.argv[1:])
