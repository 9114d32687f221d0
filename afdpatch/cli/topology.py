"""Which servers make up an AFD pair or a stock vLLM on this machine: commands, ports, cores, memory."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from afdpatch.cli import UsageError
from afdpatch.cli.servers import Server, free_port, port_is_free

BIND = "VLLM_CPU_OMP_THREADS_BIND"
CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
KV_CACHE_BYTES = 1 << 30
MEMORY_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")

# Plain log lines, and no Hugging Face or usage look-ups: the model is a folder here more often than not.
SERVER_ENV = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}


def split_cores(cores: Sequence[int], parts: int) -> list[list[int]]:
    """Contiguous blocks of `cores`, one for each part, the first ones a core longer when it doesn't come out even.

    With fewer cores than parts every part gets all of them.
    """
    if len(cores) < parts:
        return [list(cores) for _ in range(parts)]
    size, longer = divmod(len(cores), parts)
    blocks: list[list[int]] = []
    begin = 0
    for part in range(parts):
        end = begin + size + (part < longer)
        blocks.append(list(cores[begin:end]))
        begin = end
    return blocks


def core_list(cores: Sequence[int]) -> str:
    """`cores` as vLLM reads them: ranges and single cores, `0-3,6`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def physical_cores(cores: Iterable[int], topology: Path = CPU_TOPOLOGY) -> list[int]:
    """One logical CPU of each physical core among `cores`, in the order of packages and cores.

    Where the kernel doesn't say which belong together, each counts as a core.
    """
    chosen: dict[tuple[int, int], int] = {}
    for core in sorted(cores):
        folder = topology / f"cpu{core}" / "topology"
        try:
            place = (int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()))
        except (OSError, ValueError):
            place = (-1, core)
        chosen.setdefault(place, core)
    return [chosen[place] for place in sorted(chosen)]


def core_binding(parts: int) -> list[dict[str, str]]:
    """The environment that gives each of `parts` servers its own block of this process's cores.

    vLLM's automatic binding gives every server the same cores. A binding that the user has set is left alone. As
    vLLM does, one thread is bound to a physical core; where a block has four or more, one stays free for the server's
    other processes, since a bound thread that waits for a core holds up all the others.
    """
    if os.environ.get(BIND):
        return [{} for _ in range(parts)]
    logical = sorted(os.sched_getaffinity(0))
    cores = physical_cores(logical)
    blocks = split_cores(cores if len(cores) >= parts else logical, parts)
    return [{BIND: core_list(block[:-1] if len(block) >= 4 else block)} for block in blocks]


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build (by its distribution, without importing it)."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in found
    return False


def has_option(options: Sequence[str], *names: str) -> bool:
    """Whether one of vLLM's long options is given, as `--name`, `--name=...` or `--na_me`."""
    given = {word.partition("=")[0].replace("_", "-") for word in options if word.startswith("--")}
    return not given.isdisjoint(names)


def memory_default(options: Sequence[str]) -> list[str]:
    """On a CPU, a KV cache size when the user gave none: each vLLM would take 92 % of the memory."""
    if not on_cpu() or has_option(options, *MEMORY_OPTIONS) or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return []
    return ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]


def afd_pair(
    options: Sequence[str],
    log_dir: Path,
    *,
    port: int | None = None,
    ffn_port: int | None = None,
    afd_port: int | None = None,
    host: str = "127.0.0.1",
    attention_options: Sequence[str] = (),
    ffn_options: Sequence[str] = (),
    bindings: Sequence[dict[str, str]] | None = None,
) -> tuple[Server, Server]:
    """An attention and an FFN server for `options` (the model and vLLM's options), not started yet.

    The FFN's port defaults to the one after the attention server's. Ports left out are chosen among the free ones.
    """
    port = port or free_port()
    if ffn_port is None:
        ffn_port = port + 1 if port < 65535 and port_is_free(port + 1) else free_port([port])
    afd_port = afd_port or free_port([port, ffn_port])
    attention_env, ffn_env = bindings or core_binding(2)

    def one(role: str, at: int, own: Sequence[str], env: dict[str, str]) -> Server:
        words = [*options, *own]
        command = [sys.executable, "-m", "afdpatch", "serve", "--role", role, "--afd-port", str(afd_port), *words]
        command += ["--host", host, "--port", str(at), *memory_default(words)]
        log = log_dir / f"{role}.log"
        return Server(role, command, at, log, env={**SERVER_ENV, **env}, host=reachable(host))

    attention = one("attention", port, attention_options, attention_env)
    ffn = one("ffn", ffn_port, ffn_options, ffn_env)
    return attention, ffn


def stock(
    options: Sequence[str], log_dir: Path, *, port: int | None = None, binding: dict[str, str] | None = None
) -> Server:
    """A vLLM server with AFD off, its threads bound as vLLM does by itself unless `binding` says otherwise.

    vLLM leaves a core to the server's other processes. To bind threads to every core is no favour to it: on two cores,
    four requests at a time, it then made a quarter of the tokens per second.
    """
    port = port or free_port()
    env = binding or {}
    command = [sys.executable, "-m", "afdpatch", "vllm", "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    command += memory_default(options)
    return Server("stock", command, port, log_dir / "stock.log", env={**SERVER_ENV, **env})


def describe_defaults(servers: Sequence[Server], options: Sequence[str]) -> list[str]:
    """What was chosen for the user, a line each."""
    lines = []
    if not os.environ.get(BIND):
        bound = (f"{server.name} {server.env.get(BIND, 'as vLLM chooses')}" for server in servers)
        lines.append("cores: " + ", ".join(bound))
    if memory_default(options):
        lines.append(f"KV cache: {KV_CACHE_BYTES >> 30} GiB each (--kv-cache-memory-bytes changes it)")
    return lines


def reachable(host: str) -> str:
    """Where this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def split_words(text: str | None) -> list[str]:
    """A quoted group of options, as a shell would split it."""
    try:
        return shlex.split(text) if text else []
    except ValueError as error:
        raise UsageError(f"{text!r}: expected words as a shell has them, found: {error}") from None
