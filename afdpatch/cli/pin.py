"""`afdpatch pin`: makes a manifest's lock from the source of the release that the manifest names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afdpatch.registry import Lock, Manifest, PatchError, SourceTree, identify, lock_path, packaged_manifest
from afdpatch.registry.plugins import manifest_file
from afdpatch.registry.releases import Release, release_path

DESCRIPTION = """\
Reads the manifest and the source of the release that it names, takes the fingerprints of every target and of every
relied-on symbol, and writes the lock. Nothing of the package is imported.

Commit the lock together with the manifest.

With --release, the source may be of any release: what it has of the same symbols is recorded in locks/releases/ for
`afdpatch compat`, absent ones included. The manifest's own lock must be there and fresh.
"""

EXIT_CODES = """\
exit codes:
  0  the lock was written, or is the same already
  2  usage, or the manifest is not valid
  3  a target, a relied-on symbol or a holder is absent
  8  the source is another release than the manifest names
"""


SOURCE_HELP = "a directory that holds the package's folder or is it, a wheel, an sdist, or git:DIR@REV"


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pin",
        help="make the lock for a vLLM release",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    add_manifest(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the lock (default: locks/VERSION.json beside the manifest)"
    )
    parser.add_argument(
        "--release",
        action="store_true",
        help="record another release than the manifest's, for `compat`; nothing is ever served with such a record",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    try:
        path = manifest_file(args.manifest)
        manifest = Manifest.read(path)
        tree = source_tree(manifest.package, args.source)
        if args.release:
            output, text, message = _record(args, path, manifest, tree)
        else:
            lock = Lock.make(manifest, tree, installed=args.source is None)
            output, text = args.output or lock_path(path, manifest.version), lock.to_json()
            message = (
                f"{len(manifest.entries)} entries, {len(lock.symbols)} symbols in {len(lock.files)} files of "
                f"{manifest.package} {manifest.version}, digest {lock.digest[:12]}"
            )
        # A file name that is no UTF-8 has characters that can't be written, but JSON has escapes for them.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        same = output.is_file() and output.read_text(encoding="utf-8") == text
        if not same:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")
    except PatchError as error:
        print(f"afdpatch pin: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"afdpatch pin: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {'unchanged' if same else 'written'}; {message}")
    return 0


def _record(args: argparse.Namespace, path: Path, manifest: Manifest, tree: SourceTree) -> tuple[Path, str, str]:
    lock = Lock.read(lock_path(path, manifest.version))
    release = Release.make(manifest, lock, tree, identify(tree, manifest.distributions if args.source is None else ()))
    message = (
        f"{len(release.symbols)} symbols of {manifest.package} {release.version}, {len(release.absent)} absent; "
        f"{release.established['detail']}"
    )
    return args.output or release_path(path, release.version), release.to_json(), message


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """Adds `--manifest`, which `manifest_file` makes a path of."""
    parser.add_argument(
        "--manifest",
        default="afd",
        metavar="FILE|NAME",
        help="the manifest's file, or the name of one that an installed plug-in declares (default: afd, our own)",
    )


class Schema(argparse.Action):
    """`--schema`: prints the JSON Schema of a command's `--format json`, and nothing else, whatever else is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **_: Any) -> None:
        text = "print the JSON Schema of --format json, and nothing else"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, const=const, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(schema_path(self.const).read_text(encoding="utf-8"), end="")
        parser.exit()


def schema_path(command: str) -> Path:
    """The published JSON Schema of a command's `--format json`."""
    return packaged_manifest("afdpatch.manifests", "afd").parent / "schemas" / f"{command}.json"


def add_schema(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds `--schema`."""
    parser.add_argument("--schema", action=Schema, const=command)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds `--source`."""
    parser.add_argument("--source", metavar="SRC", help=f"{SOURCE_HELP} (default: the installed package)")


def source_tree(package: str, source: str | Path | None, option: str = "--source") -> SourceTree:
    """The source tree that an option names; the installed package where it isn't given.

    Raises:
        OSError: there is none.
    """
    if source is not None:
        return SourceTree.open(package, str(source))
    try:
        return SourceTree.installed(package)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; name a source with {option}") from error
