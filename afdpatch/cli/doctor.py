"""`afdpatch doctor`: what is wrong with these servers, and what to do, a line each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afdpatch.cli import UsageError

DESCRIPTION = """\
Look at AFD servers and say what is wrong, a line a finding: how bad it is, where, what was found, what to do. Without
URLs it finds the servers of this machine by itself, those whose HTTP port doesn't answer too.
"""

EPILOG = """\
examples:
  afdpatch doctor                                                 the servers of this machine
  afdpatch doctor http://127.0.0.1:8000 http://127.0.0.1:8001     these
  afdpatch doctor --log logs/up-.../attention.log --log ...       servers that won't start

exit codes: 0 nothing is wrong (notes don't count); 1 something is; 2 wrong usage.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="look at running servers, or at logs of some that won't start, and say what is wrong",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("urls", nargs="*", metavar="URL", help="servers of both roles, as http://127.0.0.1:8000")
    add("--log", action="append", type=Path, default=[], metavar="FILE", help="a server's log; more than once")
    add("--secret-file", type=Path, metavar="FILE", help="look whether the shared secret can be used")
    add("--timeout", type=float, default=5.0, metavar="S", help="how long a server may take to answer (default: 5)")
    add("--format", choices=("text", "json"), default="text", help="json: an object a line")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import findings, look

    for url in args.urls:
        if not url.startswith("http://"):
            raise UsageError(f"{url}: expected an address like http://127.0.0.1:8000")
    seen = [look.ask(url.rstrip("/"), args.timeout) for url in args.urls]
    if not args.urls and not args.log:
        seen += look.local_servers()
    found = findings.of_servers(seen)
    for path in args.log:
        found += findings.of_log(path)
    if args.secret_file:
        found += findings.of_secret(args.secret_file)
    if not seen and not args.log:
        text = "no AFD server runs here as this user"
        found.append(findings.Finding("warning", "this machine", text, "start one (afdpatch up), or give URLs or logs"))
    show(sorted(found, key=lambda finding: findings.SEVERITIES.index(finding.severity)), seen, args.format)
    return int(any(finding.severity != "note" for finding in found))


def show(found: Sequence[Any], seen: Sequence[Any], form: str) -> None:
    """Print the findings, the worst first."""
    for finding in found:
        if form == "json":
            print(json.dumps(finding._asdict()), flush=True)
        else:
            print(f"{finding.severity:<8} {finding.where}: {finding.found}; {finding.advice}", flush=True)
    if not found and form == "text":
        print(f"fine: {len(seen)} server(s), nothing found")
