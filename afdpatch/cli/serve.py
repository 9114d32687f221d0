"""`afdpatch serve --role ...`: one server of an AFD pair, as `vllm serve` with --additional-config."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from afdpatch.cli import UsageError, checks
from afdpatch.cli.checks import parse_object

USAGE = "afdpatch serve --role {attention,ffn} MODEL [options]"

DESCRIPTION = """\
Start one server of an AFD pair. It becomes

  vllm serve MODEL --additional-config '{"afd": {"role": ROLE, ...}}' [vLLM's options]

MODEL and every option that isn't named below go to vLLM as they are (`afdpatch vllm serve --help` lists them). vLLM
runs below this process, which ends every process of it 20 s after a Ctrl-C or SIGTERM at the latest, the second time
at once.
"""

EPILOG = """\
example, in two terminals:
  afdpatch serve --role attention MODEL --port 8000 --enforce-eager
  afdpatch serve --role ffn       MODEL --port 8001 --enforce-eager

on a CPU, as with `afdpatch up`: a KV cache of 1 GiB unless --kv-cache-memory-bytes or another of vLLM's settings says
otherwise, and the role's half of this process's cores unless VLLM_CPU_OMP_THREADS_BIND is set.

exit codes: vLLM's own; 2 wrong usage; 3 to 8 as in `afdpatch --help`.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start one server of an AFD pair",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="afdpatch serve --role {attention,ffn} MODEL [options] [vLLM's options]",
        allow_abbrev=False,
    )
    parser.set_defaults(takes_vllm_options=True)
    add = parser.add_argument
    add("--role", required=True, choices=("attention", "ffn"), help="which half of the model this is")
    add("--afd-host", metavar="H", help="where the two servers meet")
    add("--afd-port", type=int, metavar="P", help="the port that names the pair: the same on all servers")
    add(
        "--connector",
        metavar="NAME",
        help="shm: all on one host (the default); tcp: between hosts; ipc, nccl: the same on GPUs",
    )
    add("--rank", type=int, metavar="R", help="rank of this server's first worker in its role (default: 0)")
    add("--attention-ranks", type=int, metavar="N", help="workers of all attention servers together (default: 1)")
    add("--ffn-ranks", type=int, metavar="N", help="workers of all FFN servers together (default: 1)")
    add("--ffn-tp", type=int, metavar="N", help="tensor-parallel size of each FFN server (default: 1)")
    add(
        "--ffn-addresses",
        metavar="H:P,...",
        help="tcp, nccl: where each FFN server listens (default: afd-port + its number)",
    )
    add("--secret-file", metavar="FILE", help="16 to 4096 bytes that all servers must have, for your eyes only")
    add("--afd-config", metavar="JSON", help="further keys of the `afd` configuration")


def afd_of(args: argparse.Namespace) -> dict[str, Any]:
    """The `afd` configuration that the options give."""
    given = {
        "role": args.role,
        "host": args.afd_host,
        "port": args.afd_port,
        "connector": args.connector,
        "rank": args.rank,
        "num_attention_ranks": args.attention_ranks,
        "num_ffn_ranks": args.ffn_ranks,
    }
    extra = {
        "ffn_tp": args.ffn_tp,
        "ffn_addresses": args.ffn_addresses.split(",") if args.ffn_addresses else None,
        "secret_file": os.path.abspath(args.secret_file) if args.secret_file else None,
    }
    afd = {key: value for key, value in given.items() if value is not None}
    if any(value is not None for value in extra.values()):
        afd["connector_extra_config"] = {key: value for key, value in extra.items() if value is not None}
    return afd


def run(args: argparse.Namespace) -> int:
    from afdpatch.cli import vllm

    afd = afd_of(args)
    if args.afd_config:
        afd = merge(afd, parse_object(args.afd_config, "--afd-config"), "--afd-config")
    words = vllm_options(afd, args.rest)
    checks.check_model(checks.model_of(args.rest, USAGE), args.rest)
    checks.check_options(args.rest)
    checks.check_afd(json.loads(words[-1])["afd"])
    if args.is_process and not kept():
        keep()
    return vllm.run_vllm(["serve", *words[:-2], *cpu_defaults(args.role, args.rest), *words[-2:]])


def kept() -> bool:
    """Whether this process runs directly below a keeper."""
    from afdpatch.cli import keeper

    return os.environ.get(keeper.MARK) == str(os.getppid())


def keep() -> NoReturn:
    """Become the keeper of this same command line, in the same process.

    vLLM's API process waits long for an engine that a signal has ended already; the keeper doesn't.
    """
    from afdpatch.cli import keeper
    from afdpatch.cli.servers import GRACE_SECONDS

    sys.stdout.flush()
    # The mask and what is pending outlive the exec: the keeper takes a signal that comes now.
    signal.pthread_sigmask(signal.SIG_BLOCK, keeper.SIGNALS)
    again = [sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, [sys.executable, "-I", "-S", keeper.__file__, str(GRACE_SECONDS), "0", "--", *again])


def cpu_defaults(role: str, options: Sequence[str]) -> list[str]:
    """On a CPU, what `up` gives a server of this role where the user said nothing: options; cores by the environment.

    A line on stderr says what was chosen.
    """
    from afdpatch.cli import topology

    if not topology.on_cpu():
        return []
    chosen = []
    if memory := topology.memory_default(options):
        chosen.append(f"KV cache {topology.KV_CACHE_BYTES >> 30} GiB (--kv-cache-memory-bytes changes it)")
    workers = checks.count_of(options, "--tensor-parallel-size", "-tp")
    workers *= checks.count_of(options, "--data-parallel-size", "-dp")
    binding = topology.worker_binding([workers, workers])[("attention", "ffn").index(role)]
    if cores := binding.get(topology.BIND):
        os.environ[topology.BIND] = cores
        chosen.append(f"cores {cores}, the {role} server's half ({topology.BIND} changes it)")
    if chosen:
        print(f"afdpatch: note: {'; '.join(chosen)}", file=sys.stderr, flush=True)
    return memory


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


def merge(first: Mapping[str, Any], second: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Both together, objects within them too; a key that both have with different values is an error that names it."""
    both = dict(first)
    for key, value in second.items():
        if isinstance(value, Mapping) and isinstance(first.get(key), Mapping):
            both[key] = merge(first[key], value, option)
        elif key in first and first[key] != value:
            raise UsageError(
                f"{option}: key {key!r} is {json.dumps(value)} there and {json.dumps(first[key])} elsewhere "
                "on the command line; give it once"
            )
        else:
            both[key] = value
    return both
