"""`afdpatch vllm ...`: vLLM's own command line, in this process, with afdpatch armed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("vllm", help="run vLLM's own command line with afdpatch armed", add_help=False)


def run(args: argparse.Namespace) -> int:
    return run_vllm(args.rest)


def run_vllm(arguments: Sequence[str]) -> int:
    """Run `vllm ARGUMENTS...` here; returns its exit code, or lets its SystemExit through.

    The import of afdpatch, which came before, has armed what must be in place when vLLM is imported. Where that
    failed, or fails once vLLM is imported, vLLM doesn't run: a server with a role must not come up as a plain one.
    """
    import afdpatch
    from afdpatch.registry import PatchError

    try:
        afdpatch.register()
        from vllm.entrypoints.cli.main import main

        sys.argv = ["vllm", *arguments]
        main()  # type: ignore[no-untyped-call,unused-ignore]
    except PatchError as error:
        print(f"afdpatch: error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        print(
            "afdpatch: error: expected vLLM 0.30.0 beside afdpatch, found none; `make env`, or install "
            "afdpatch[cpu] or afdpatch[cuda]",
            file=sys.stderr,
        )
        return 1
    return 0
