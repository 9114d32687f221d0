"""What `verify`, `list`, `explain` and `map` have in common: the options that say which manifest and which source."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from afdpatch.cli.pin import add_manifest, add_source, source_tree
from afdpatch.registry import (
    Lock,
    Manifest,
    PatchError,
    Report,
    SourceTree,
    identify,
    lock_path,
    verify,
)
from afdpatch.registry.marks import Marks
from afdpatch.registry.plugins import manifest_file

COMPILE_PROBE = "afdpatch.patches.compile_probe"
"""The module that tries traced entries under torch.compile; the registry knows no torch."""


@dataclass(frozen=True)
class Opened:
    """A manifest held against a source.

    Attributes:
        path: the manifest.
        manifest: as it is now.
        marks: its lines.
        tree: the source.
        report: the verdicts.
    """

    path: Path
    manifest: Manifest
    marks: Marks
    tree: SourceTree
    report: Report


def add_options(parser: argparse.ArgumentParser, *, source: bool = True) -> None:
    """Adds `--manifest` and `--source`."""
    add_manifest(parser)
    if source:
        add_source(parser)


def manifest_path(args: argparse.Namespace) -> Path:
    """The manifest that `--manifest` names, or afdpatch's own.

    Raises:
        ManifestError: no installed plug-in declares one of that name.
    """
    return manifest_file(args.manifest)


def opened(args: argparse.Namespace, *, probe: bool = False) -> Opened:
    """Reads the manifest and its lock, and holds them against the source. Nothing of the package is imported.

    Args:
        args: `--manifest` and `--source`.
        probe: also ask each entry's `remove_when`, in a process of its own.

    Raises:
        PatchError: the manifest or the lock is of no use.
        OSError: there is no source.
    """
    path = manifest_path(args)
    manifest = Manifest.read(path)
    lock = Lock.read(lock_path(path, manifest.version))
    tree = source_tree(manifest.package, args.source)
    identity = identify(tree, manifest.distributions if args.source is None else ())
    probes = None
    if probe:
        from afdpatch.registry.probe import run_probes

        probes = run_probes(lock.manifest.entries, COMPILE_PROBE)
    report = verify(lock, tree, identity, manifest=manifest, probes=probes)
    return Opened(path, manifest, Marks.read(path), tree, report)


def guarded(command: str, body: Callable[[], int]) -> int:
    """Runs a command's body; errors become one line and an exit code.

    Meanwhile Python's cyclic collector rests: it would walk again and again over a million nodes of syntax trees, which
    all stay to the end. That was a third of the time of `verify`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return body()
    except PatchError as error:
        print(f"afdpatch {command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has had enough (`| head`). What Python would still flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"afdpatch {command}: {error}", file=sys.stderr)
        return 2
    finally:
        if collects:
            gc.enable()
