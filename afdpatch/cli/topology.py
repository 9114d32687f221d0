"""Which servers make up an AFD pair, several of each role, or a stock vLLM: commands, ports, cores, memory."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
AFD_PORT = 1239


@dataclass(frozen=True)
class Shape:
    """How many servers of each role, and how many workers each has."""

    attention: int = 1
    ffn: int = 1
    attention_dp: int = 1
    attention_tp: int = 1
    ffn_tp: int = 1

    @property
    def workers(self) -> list[int]:
        """Workers of each server, the attention servers first."""
        return [self.attention_dp * self.attention_tp] * self.attention + [self.ffn_tp] * self.ffn

    @property
    def ranks(self) -> tuple[int, int]:
        """Worker totals of both roles, as the configuration counts them."""
        return self.attention * self.attention_dp * self.attention_tp, self.ffn * self.ffn_tp

    def rank_options(self, role: str, index: int) -> list[str]:
        """`serve`'s options that place server `index` of a role; none for a pair of one worker each."""
        if self.ranks == (1, 1):
            return []
        rank = index * (self.attention_dp * self.attention_tp if role == "attention" else self.ffn_tp)
        counts = ["--attention-ranks", str(self.ranks[0]), "--ffn-ranks", str(self.ranks[1])]
        return ["--rank", str(rank), *counts, *(["--ffn-tp", str(self.ffn_tp)] if self.ffn_tp > 1 else [])]

    def vllm_options(self, role: str) -> list[str]:
        """vLLM's own options for a role's parallel workers."""
        tp, dp = (self.attention_tp, self.attention_dp) if role == "attention" else (self.ffn_tp, 1)
        return [
            *(["--tensor-parallel-size", str(tp)] if tp > 1 else []),
            # Of several API servers, which vLLM starts by itself with data parallelism, AFD does only one.
            *(["--data-parallel-size", str(dp), "--api-server-count", "1"] if dp > 1 else []),
        ]


@dataclass(frozen=True)
class Meeting:
    """How the servers of both roles find one another; `hosts`: of the attention servers, then of the FFN servers."""

    port: int
    connector: str | None = None
    secret_file: str | None = None
    hosts: tuple[str, ...] = ()

    def options(self, shape: Shape) -> list[str]:
        """`serve`'s options, the same for all servers."""
        words = ["--afd-port", str(self.port)]
        words += ["--connector", self.connector] if self.connector else []
        words += ["--secret-file", self.secret_file] if self.secret_file else []
        ffn_hosts = self.hosts[shape.attention :]
        addresses = [f"{bracketed(host)}:{self.port + index}" for index, host in enumerate(ffn_hosts)]
        return [*words, *(["--ffn-addresses", ",".join(addresses)] if addresses else [])]


def split_cores(cores: Sequence[int], parts: int) -> list[list[int]]:
    """Contiguous blocks of `cores`, one for each part, the first ones a core longer when it doesn't come out even.

    With fewer cores than parts each part gets one, in turn: threads of two servers that share all cores would wait for
    each other the more.
    """
    if len(cores) < parts:
        return [[cores[part % len(cores)]] for part in range(parts)]
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


def worker_binding(workers: Sequence[int]) -> list[dict[str, str]]:
    """`core_binding` for servers of so many workers each; a server's workers have a block each, split by `|`."""
    blocks = core_binding(sum(workers))
    found = []
    for count in workers:
        own, blocks = blocks[:count], blocks[count:]
        found.append({BIND: "|".join(block[BIND] for block in own)} if BIND in own[0] else {})
    return found


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
    ports = choose_ports(Shape(), port, ffn_port)
    attention, ffn = afd_servers(
        options,
        log_dir,
        Shape(),
        Meeting(afd_port or free_port(ports)),
        ports,
        host=host,
        attention_options=attention_options,
        ffn_options=ffn_options,
        bindings=bindings,
    )
    return attention, ffn


def choose_ports(shape: Shape, port: int | None, ffn_port: int | None, *, look: bool = True) -> list[int]:
    """An HTTP port for each server, the attention servers first: consecutive ones where they are free.

    Args:
        shape: how many there are.
        port: the first attention server's (default: a free one).
        ffn_port: the first FFN server's (default: the one after the last attention server's).
        look: whether to pass over ports that are taken; those that were given are taken as they are.
    """
    ports: list[int] = []
    given = {0: port, shape.attention: ffn_port}
    for index in range(shape.attention + shape.ffn):
        want = given.get(index) or (ports[-1] + 1 if ports else None)
        chosen = given.get(index) is not None or (want is not None and not look)
        if want is None or (not chosen and (want > 65535 or want in ports or not port_is_free(want))):
            want = free_port(ports)
        ports.append(want)
    return ports


def afd_servers(
    options: Sequence[str],
    log_dir: Path,
    shape: Shape,
    meeting: Meeting,
    ports: Sequence[int],
    *,
    host: str = "127.0.0.1",
    attention_options: Sequence[str] = (),
    ffn_options: Sequence[str] = (),
    bindings: Sequence[dict[str, str]] | None = None,
) -> tuple[Server, ...]:
    """The servers of a shape, the attention servers first, not started yet.

    Args:
        options: the model and vLLM's options, for all servers.
        log_dir: where each gets a log of its own name.
        shape: how many there are.
        meeting: how they find one another.
        ports: an HTTP port for each.
        host: the address that all listen on for HTTP.
        attention_options: for the attention servers alone.
        ffn_options: for the FFN servers alone.
        bindings: the environment that binds each one's threads (default: this process's cores, divided).
    """
    roles = [("attention", index) for index in range(shape.attention)] + [("ffn", index) for index in range(shape.ffn)]
    counts = {"attention": shape.attention, "ffn": shape.ffn}
    servers = []
    for (role, index), at, env in zip(roles, ports, bindings or worker_binding(shape.workers), strict=True):
        name = role if counts[role] == 1 else f"{role}{index}"
        words = [*options, *(attention_options if role == "attention" else ffn_options), *shape.vllm_options(role)]
        command = [sys.executable, "-m", "afdpatch", "serve", "--role", role, *meeting.options(shape)]
        command += [*shape.rank_options(role, index), *words]
        command += ["--host", host, "--port", str(at), *memory_default(words)]
        log = log_dir / f"{name}.log"
        servers.append(Server(name, command, at, log, env={**SERVER_ENV, **env}, host=reachable(host)))
    return tuple(servers)


def plain_command(server: Server) -> str:
    """A server's command as a person types it in a shell, with its cores."""
    words = ["afdpatch", *server.command[3:]]
    bind = server.env.get(BIND)
    return (f"{BIND}={shlex.quote(bind)} " if bind else "") + shlex.join(words)


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


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
