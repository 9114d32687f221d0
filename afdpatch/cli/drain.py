"""`afdpatch drain URL`: take an FFN server out of service, or back, with nobody noticing."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from typing import Any

from afdpatch.cli import UsageError

DESCRIPTION = """\
Tell an FFN server to let its peers go: hops that have arrived are answered, then the attention servers turn to another
FFN server, and this one can be stopped. Returns when no peer is left. With --resume it takes peers again.

Without another FFN server the attention servers wait for this one to come back, until recovery_timeout_s.
"""

EPILOG = """\
a rolling restart, one FFN server after the other:
  afdpatch drain http://127.0.0.1:8001 && restart it, and wait until its /health answers 200

exit codes: 0 no peer is left (or, with --resume, it takes peers again); 1 not within --timeout, or the server answers
otherwise; 2 wrong usage.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="take an FFN server out of service, for a restart that nobody notices",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="the FFN server's HTTP address, as http://127.0.0.1:8001")
    add("--resume", action="store_true", help="take peers again")
    add("--timeout", type=float, default=60.0, metavar="S", help="how long to wait (default: 60)")
    add("--api-key", metavar="KEY", help="the server's API key (default: the environment's VLLM_API_KEY)")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import client

    url = args.url.rstrip("/")
    if not url.startswith("http://"):
        raise UsageError(f"{args.url}: expected an address like http://127.0.0.1:8001")
    key = args.api_key or os.environ.get("VLLM_API_KEY")
    deadline = time.monotonic() + args.timeout
    try:
        status = client.get_json(f"{url}/afd/{'resume' if args.resume else 'drain'}", {}, 10, key)
        seen = None
        while not done(status, args.resume):
            peers = sum(worker["peers"] for worker in status["workers"])
            if peers != seen and not args.resume:
                print(f"{url}: {peers} peer(s) left", file=sys.stderr, flush=True)
                seen = peers
            if time.monotonic() > deadline:
                what = "to take peers again" if args.resume else f"to have no peers left, found {peers}"
                print(f"afdpatch: error: {url}: expected it within {args.timeout:g} s {what}", file=sys.stderr)
                return 1
            threading.Event().wait(0.2)
            status = client.get_json(f"{url}/afd/status", None, 10)
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"afdpatch: error: {url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(f"{url}: takes peers again" if args.resume else f"{url}: drained; it can be stopped now")
    return 0


def done(status: Any, resume: bool) -> bool:
    """Whether the server's first worker, the one that listens, has done what was asked."""
    worker = status["workers"][0]
    return not worker["draining"] if resume else worker["draining"] and not worker["peers"]
