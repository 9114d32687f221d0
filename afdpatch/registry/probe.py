"""Asks the `remove_when` functions, in a process of their own: they may import the package, and need it unpatched.

So are the entries' own probes. Traced entries that patch something are tried under torch.compile, by a module that the
caller names, since nothing here knows torch.

`python -m afdpatch.registry.probe FILE NAME...` writes a JSON object: for each name true, false or an error's text.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afdpatch.registry.forms import attribute
from afdpatch.registry.manifest import Entry

TIMEOUT_S = 600


def run_probes(entries: Iterable[Entry], compiler: str | None = None) -> dict[str, bool | str]:
    """Asks each entry's `remove_when` and `probe`, and tries each traced entry that patches under torch.compile.

    Args:
        entries: what to ask.
        compiler: as for `compile_probes`; None: nothing is tried under torch.compile.

    Returns:
        For each entry that has any: true if the entry is obsolete, false if it is fine, or an error's text: why that
        is not known, or, beginning with `torch.compile: ` or `probe: `, why compiled code would not run the
        replacement, or what the entry's own probe said.
    """
    entries = list(entries)
    removals = {entry.id: entry.remove_when for entry in entries if entry.remove_when}
    probes = {entry.id: entry.probe for entry in entries if entry.probe}
    answers = _asked([*removals.values(), *probes.values()])
    results = {entry_id: answers[name] for entry_id, name in removals.items()}
    own = {entry_id: answers[name] for entry_id, name in probes.items()}
    tried = {}
    if compiler is not None:
        traced = (entry for entry in entries if entry.path == "traced" and entry.patches_target)
        tried = compile_probes(traced, compiler)
    for what, outcomes in (("probe", own), ("torch.compile", tried)):
        for name, outcome in outcomes.items():
            if outcome is not True:
                results[name] = f"{what}: {'it returned false' if outcome is False else outcome}"
            else:
                results.setdefault(name, False)
    return results


def _asked(names: Iterable[str]) -> dict[str, bool | str]:
    """What functions answer, all asked in one process."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    found, error = _answer(wanted, "afdpatch.registry.probe")
    return dict.fromkeys(wanted, error) if error else found


def compile_probes(
    entries: Iterable[Entry], compiler: str, forms: Mapping[str, str] | None = None
) -> dict[str, bool | str]:
    """Tries traced entries under torch.compile.

    Args:
        entries: what to try.
        compiler: the module that knows torch.compile: run in a process of its own, with a file for the answer as its
            argument and a list of `[replacement, kind, form]` as JSON on stdin.
        forms: each target's form, by the entry's id; left out: every form is tried.

    Returns:
        For each entry true, or why its replacement would not run in compiled code.
    """
    entries = list(entries)
    if not entries:
        return {}
    jobs = []
    for entry in entries:
        every = ("method", "staticmethod", "classmethod", "property") if "." in entry.qualname else ("function",)
        for form in [forms[entry.id]] if forms is not None else every:
            jobs.append((entry.id, [entry.replacement, entry.kind, form]))
    found, error = _answer([], compiler, json.dumps([job for _, job in jobs]))
    if error:
        return dict.fromkeys((entry.id for entry in entries), error)
    results: dict[str, bool | str] = {}
    for (name, _), outcome in zip(jobs, found, strict=True):
        if results.get(name, True) is True:
            results[name] = outcome
    return results


def _answer(arguments: Sequence[str], module: str, given: str = "") -> tuple[Any, str | None]:
    """What a module run in another process answers, or why it gave no answer."""
    # The answer goes through a file: the package may print what it likes.
    with tempfile.TemporaryDirectory(prefix="afdpatch-probe-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", module, str(answer), *arguments]
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None, f"no answer in {TIMEOUT_S} s"
        if not answer.is_file():
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return None, f"the probe's process ended with {done.returncode}: {last}"
        return json.loads(answer.read_text(encoding="utf-8")), None


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
        value = attribute(importlib.import_module(module), qualname)
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
