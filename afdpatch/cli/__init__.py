"""The command line: `afdpatch COMMAND ...`.

Each command is a module with `add_parser(subparsers)` and `run(args) -> int`, imported only when it is the one that
was asked for, so that `afdpatch --help` loads neither rich nor torch nor vLLM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

EXIT_CODES = """\
exit codes:
  0  fine                          5  a patch meets somebody else's change, or its lock is stale
  1  failed (the message says how) 6  a patch is no longer needed
  2  wrong usage                   7  a patch is not in effect in some process
  3  a patch's target is absent    8  another vLLM than the pinned one
  4  a patch's target has changed
"""

EXAMPLES = """\
examples:
  afdpatch up tests/models/qwen3-moe --port 8000        an attention and an FFN server on this machine
  afdpatch serve --role ffn MODEL --port 8001           one of the two
  afdpatch vllm serve MODEL                             vLLM itself
  afdpatch verify                                       hold the patches against the installed vLLM
"""


INTERRUPTED, READER_GONE = 130, 141
"""128 + SIGINT and 128 + SIGPIPE, as a shell says it."""


class UsageError(Exception):
    """The command line can't be carried out as given: one line, exit code 2."""


class Command(NamedTuple):
    """A command's place in the help and where its module is."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("serve", "serve", "start one server of an AFD pair: vllm serve with a role"),
    Command("up", "up", "start an attention and an FFN server on this machine and watch over them"),
    Command("drain", "drain", "take an FFN server out of service, for a restart that nobody notices"),
    Command("doctor", "doctor", "look at running servers, or at logs of some that won't start, and say what is wrong"),
    Command("demo", "demo", "an AFD pair and a stock vLLM side by side: are the tokens the same?"),
    Command("vllm", "vllm", "run vLLM's own command line with afdpatch armed"),
    Command("bench", "", "measure: `bench serve`, `tpot` (AFD against stock vLLM), `hop`, `hop-gpu` (the hop alone)"),
    Command("verify", "verify", "hold the patches against the installed vLLM"),
    Command("pin", "pin", "make the lock for a vLLM release"),
    Command("diff", "diff", "what changed under a patch: pinned vLLM, another vLLM, our replacement"),
    Command("compat", "compat", "how the patches stand in other vLLM releases"),
    Command("bisect", "bisect", "the first vLLM commit that breaks each patch"),
    # Not modules `list` and `map`: a submodule's name becomes a global of this package, and would hide the built-in.
    Command("list", "listing", "list the patches"),
    Command("explain", "explain", "why a patch is there, where, and when it can go"),
    Command("map", "mapping", "vLLM's chain from the API server to the model, with the patches on it"),
    Command("models", "models", "list the models and features that AFD serves, and what it refuses"),
)
BENCHES = (
    Command("hop", "bench_hop", "time and rate of the hop between two processes, without vLLM"),
    Command("hop-gpu", "bench_hop_gpu", "round trip of the hop between two GPUs, beside NCCL"),
    Command("tpot", "bench_tpot", "time per output token on GPUs: AFD against stock vLLM"),
    Command("serve", "bench_serve", "AFD against stock vLLM at equal cores, in alternating rounds"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A Ctrl-C or a reader that has gone ends it without a traceback."""
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a file's name may be no UTF-8
    try:
        try:
            return dispatch(list(sys.argv[1:] if argv is None else argv), is_process=argv is None)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except KeyboardInterrupt:
        if argv is None:  # the process ends now: a second Ctrl-C has nothing left to interrupt
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED
    except BrokenPipeError:
        if not discard_stdout():
            raise
        return READER_GONE
    except SystemExit as end:
        # rich ends the process by itself when the reader of a table has gone.
        if isinstance(end.__context__, BrokenPipeError):
            return READER_GONE
        raise


def discard_stdout() -> bool:
    """Whether nobody reads stdout any more; what is left of it then goes nowhere, so that the exit is quiet."""
    import select

    try:
        out = sys.stdout.fileno()
        poll = select.poll()
        poll.register(out, select.POLLOUT)
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False
    if gone:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out)
        os.close(null)
    return gone


def dispatch(arguments: list[str], is_process: bool) -> int:
    """Run the command that the arguments name. `is_process`: they are this process's own."""
    if arguments[:1] == ["vllm"] and present("vllm"):
        # vLLM parses these itself, --help included.
        from afdpatch.cli import vllm

        return vllm.run_vllm(arguments[1:])
    parser, module = build_parser(arguments)
    args, rest = parser.parse_known_args(arguments)
    if module is None:
        parser.print_help()
        return 2
    if rest and not getattr(args, "takes_vllm_options", False):
        parser.error(f"unknown option or argument: {rest[0]} (see afdpatch {' '.join(chosen(arguments))} --help)")
    args.rest, args.is_process = rest, is_process
    try:
        return int(module.run(args))
    except UsageError as error:
        print(f"afdpatch: error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        # Errors of the patch registry bring their own exit codes.
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        print(f"afdpatch: error: {error}", file=sys.stderr)
        return code


def build_parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, Any]:
    """The parser for these arguments, and the chosen command's module (None when no command is named)."""
    parser = argparse.ArgumentParser(
        prog="afdpatch",
        description="Serve one model from attention servers and FFN servers: vLLM, patched at a few verified points.",
        epilog=EXAMPLES + "\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"afdpatch {version()}")
    return parser, fill(parser, COMMANDS, list(arguments))


def fill(parser: argparse.ArgumentParser, commands: Sequence[Command], arguments: list[str]) -> Any:
    """Give the parser its commands: the chosen one from its module, the others as a name and a line of help."""
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=False)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    chosen_module: Any = None
    for command in commands:
        if command.module and not present(command.module):
            continue
        if command.name != wanted:
            subparsers.add_parser(command.name, help=command.help)
        elif command.module:
            chosen_module = importlib.import_module(f"{__name__}.{command.module}")
            chosen_module.add_parser(subparsers)
        else:
            bench = subparsers.add_parser(command.name, help=command.help, description=command.help)
            chosen_module = fill(bench, BENCHES, arguments[arguments.index(command.name) + 1 :])
            if chosen_module is None and not {"-h", "--help"} & set(arguments):
                bench.error("expected one of: " + ", ".join(b.name for b in BENCHES if present(b.module)))
    return chosen_module


def chosen(arguments: Sequence[str]) -> list[str]:
    """The words that name the command, for messages."""
    words = [word for word in arguments if not word.startswith("-")]
    return words[: 2 if words[:1] == ["bench"] else 1]


def present(module: str) -> bool:
    """Whether a command's module exists."""
    return importlib.util.find_spec(f"{__name__}.{module}") is not None


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("afdpatch")
    except PackageNotFoundError:
        return "unknown (not installed)"
