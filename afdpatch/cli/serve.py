"""`afdpatch serve --role ...`: one server of an AFD pair, as `vllm serve` with --additional-config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from afdpatch.cli import UsageError

DESCRIPTION = """\
Start one server of an AFD pair. It becomes, in this process,

  vllm serve MODEL --additional-config '{"afd": {"role": ROLE, ...}}' [vLLM's options]

MODEL and every option that isn't named below go to vLLM as they are (`afdpatch vllm serve --help` lists them).
"""

EPILOG = """\
example, in two terminals:
  afdpatch serve --role attention MODEL --port 8000 --enforce-eager
  afdpatch serve --role ffn       MODEL --port 8001 --enforce-eager

exit codes: vLLM's own; 2 wrong usage; 3 to 8 as in `afdpatch --help`.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start one server of an AFD pair",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch serve --role {attention,ffn} MODEL [--afd-host H] [--afd-port P] [--afd-config JSON] "
        "[vLLM's options]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    parser.add_argument("--role", required=True, choices=("attention", "ffn"), help="which half of the model this is")
    parser.add_argument("--afd-host", metavar="H", help="where the two servers meet")
    parser.add_argument("--afd-port", type=int, metavar="P", help="the port that names the pair: the same on both")
    parser.add_argument("--afd-config", metavar="JSON", help="further keys of the `afd` configuration")


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import vllm

    given = {"role": args.role, "host": args.afd_host, "port": args.afd_port}
    afd = merge(
        {key: value for key, value in given.items() if value is not None},
        parse_object(args.afd_config, "--afd-config") if args.afd_config else {},
        "--afd-config",
    )
    return vllm.run_vllm(["serve", *vllm_options(afd, args.rest)])


def vllm_options(afd: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """vLLM's options with `afd` merged into the user's own --additional-config, the rest in its order.

    Raises UsageError for a key that both give with different values, and for a form that can't be merged.
    """
    rest: list[str] = []
    additional: dict[str, Any] = {}
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name == "--additional-config":
            value = value if equals else next(words, "")
            additional = merge(additional, parse_object(value, name), name)
        elif name.startswith("--additional-config."):
            raise UsageError(f"{word}: expected --additional-config '{{...}}', which the role can be merged into")
        else:
            rest.append(word)
    own = additional.get("afd", {})
    if not isinstance(own, dict):
        raise UsageError(f"--additional-config: expected an object at key 'afd', found {own!r}")
    additional["afd"] = merge(dict(afd), own, "--additional-config")
    return [*rest, "--additional-config", json.dumps(additional)]


def parse_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object from the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: expected a JSON object, found {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text!r}")
    return value


def merge(first: dict[str, Any], second: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Both together; a key that both have with different values is an error that names it."""
    for key, value in second.items():
        if key in first and first[key] != value:
            raise UsageError(
                f"{option}: key {key!r} is {json.dumps(value)} there and {json.dumps(first[key])} elsewhere "
                "on the command line; give it once"
            )
    return {**first, **second}
