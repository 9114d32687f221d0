"""`afdpatch map`: the package's chain from the API server to the model, with the patches on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from afdpatch.cli._registry import add_options, guarded, manifest_path, opened
from afdpatch.cli.pin import add_schema
from afdpatch.registry.chain import Chain, trace

DESCRIPTION = """\
Shows vLLM's chain from the API server to the model: each box once, with its file and line in the vLLM at hand, what it
does in each role, and the patches that hook it. A symbol that isn't found is shown as absent. Nothing of vLLM is
imported.
"""

EPILOG = """\
examples:
  afdpatch map                                            a tree
  afdpatch map --html map.html                            one page that loads nothing else, with links to the commit
  afdpatch map --source vllm-0.31.0.whl                   what is where in another release
  afdpatch map --format json | jq '.boxes[] | select(.patches != []) | .id'

exit codes:
  0  shown, whatever the verdict (afdpatch verify ends with it)
  2  usage, or the manifest or the chain is not valid
  5  the lock cannot be read
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "map",
        help="vLLM's chain from the API server to the model, with the patches on it",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print (default: text)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of HTML instead")
    parser.add_argument(
        "--chain", type=Path, metavar="FILE", help="the chain (default: NAME.chain.yaml beside the manifest NAME.yaml)"
    )
    add_options(parser)
    add_schema(parser, "map")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return guarded("map", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    manifest = manifest_path(args)
    chain = Chain.read(args.chain or manifest.with_name(f"{manifest.stem}.chain.yaml"))
    case = opened(args)
    found = trace(chain, case.report, case.tree)
    if args.html is not None:
        from afdpatch.registry.reports.map_html import map_html

        args.html.write_text(map_html(found), encoding="utf-8")
        print(f"{args.html}: {len(found.stations)} boxes, {case.report.summary}", file=sys.stderr)
    elif args.format == "json":
        print(json.dumps(found.as_dict(), indent=2))
    else:
        from afdpatch.registry.reports.map_text import print_map
        from afdpatch.registry.reports.text import console

        print_map(found, console())
    return 0
