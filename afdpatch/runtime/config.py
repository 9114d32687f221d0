"""The keys of ``additional_config["afd"]``, as afd-plugin has them, so that its command lines run."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

ROLES = ("attention", "ffn")
RPC_DEADLINE_S = 300.0
"""vLLM's default deadline of one worker call (``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``), in seconds."""
MIN_PEER_TIMEOUT_S = 2.0
"""Least ``peer_timeout_s``: an idle attention rank pings twice a second."""

_ALIASES = {
    "afd_role": "role",
    "afd_connector": "connector",
    "async": "async_dp",
    "afd_host": "host",
    "afd_port": "port",
}
_KEYS = (
    "role",
    "connector",
    "async_dp",
    "host",
    "port",
    "rank",
    "num_attention_ranks",
    "num_ffn_ranks",
    "compute_gate_on_attention",
    "connector_extra_config",
)
# connector name -> transport that carries its hops here
_CONNECTORS = {
    "shm": "shm",
    "tcp": "tcp",
    "ipc": "ipc",
    "nccl": "nccl",
    "P2pNcclAFDConnector": "shm",
    "GpuAsyncAFDConnector": "shm",
}
_PLUGIN_CONNECTORS = ("P2pNcclAFDConnector", "GpuAsyncAFDConnector")
_ASYNC_CONNECTORS = ("GpuAsyncAFDConnector",)
_ASCEND_CONNECTORS = ("CAMP2pAFDConnector", "CAMAsyncAFDConnector", "P2pHcclAFDConnector", "WindowAFDConnector")
_OWN_EXTRA_KEYS = (
    "connect_timeout_s",
    "hop_timeout_s",
    "recovery_timeout_s",
    "peer_timeout_s",
    "spin_us",
    "merge",
    "ffn_tp",
    "secret_file",
    "ffn_addresses",
    "a2f_dtype",
)
A2F_DTYPES = ("auto", "fp8_e4m3")
# Keys of afd-plugin's own connectors: they mean nothing to these here, but a command line that has them must run.
_FOREIGN_EXTRA_KEYS = (
    "async_moe_num_ubatches",
    "async_moe_split",
    "async_moe_ubatching",
    "async_slots",
    "async_transfer",
    "attn_core_num",
    "attn_ranks_per_dp",
    "compute_gate_on_attention",
    "core_num",
    "dynamicQuant",
    "ffn_core_num",
    "hccl_buffer_size",
    "micro_batch_num",
    "quant_mode",
    "recv_poll_timeout_ms",
    "ring_depth",
)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]\0]+):[0-9]{1,5}", re.ASCII)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class ConfigError(ValueError):
    """One line: the key, the value found and what is allowed."""

    def __init__(self, key: str, found: str, allowed: str) -> None:
        super().__init__(f"AFD configuration: {key}: found {found}; {allowed}")
        self.key = key
        self.found = found
        self.allowed = allowed


@dataclass(frozen=True)
class AfdConfig:
    """What one server knows about AFD before anything is loaded.

    Counts are worker totals (data parallel x tensor parallel), as in afd-plugin. Times are seconds unless the name
    says otherwise.
    """

    role: str = "attention"
    connector: str = "shm"
    async_dp: bool = False
    host: str = "127.0.0.1"
    port: int = 1239
    rank: int = 0
    """Rank of this server's first worker among its own role's."""
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    compute_gate_on_attention: bool = False
    connect_timeout_s: float = 600.0
    hop_timeout_s: float = 60.0
    recovery_timeout_s: float = 120.0
    peer_timeout_s: float = 30.0
    spin_us: int = 50
    merge: bool = True
    ffn_tp: int = 1
    """Tensor-parallel size of each FFN server."""
    secret_file: str | None = None
    ffn_addresses: tuple[str, ...] = ()
    a2f_dtype: str = "auto"
    """How hidden states travel to the FFN: in the model's dtype, or rounded. What comes back never is."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Keys of ``connector_extra_config`` that afd-plugin's connectors know and that have no effect here, sorted."""

    @classmethod
    def parse(cls, mapping: object, *, rpc_deadline_s: float = RPC_DEADLINE_S) -> AfdConfig:
        """Read ``additional_config["afd"]``.

        Args:
            mapping: a mapping from str keys, as JSON gives it.
            rpc_deadline_s: vLLM's deadline of a worker call in seconds; ``hop_timeout_s`` and ``recovery_timeout_s``
                must be shorter.

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or an alias beside its own key.
        """
        given = _canonical(mapping)
        default = cls()
        connector = _connector(given.get("connector", default.connector))
        async_dp = _boolean("async_dp", given.get("async_dp", default.async_dp))
        if async_dp and connector not in _ASYNC_CONNECTORS:
            raise ConfigError(
                "async_dp", f"true with connector {connector!r}", f"true needs one of {', '.join(_ASYNC_CONNECTORS)}"
            )
        role = _role(given.get("role", default.role))
        ranks = {key: _count(key, given.get(key, 1)) for key in ("num_attention_ranks", "num_ffn_ranks")}
        extra, ignored = _extra(given.get("connector_extra_config", {}), connector)
        config = cls(
            role=role,
            connector=connector,
            async_dp=async_dp,
            host=_host(given.get("host", default.host)),
            port=_port(given.get("port", default.port)),
            rank=_rank(given.get("rank", default.rank), role, ranks[f"num_{role}_ranks"]),
            num_attention_ranks=ranks["num_attention_ranks"],
            num_ffn_ranks=ranks["num_ffn_ranks"],
            compute_gate_on_attention=_boolean(
                "compute_gate_on_attention", given.get("compute_gate_on_attention", default.compute_gate_on_attention)
            ),
            connect_timeout_s=_seconds(extra, "connect_timeout_s", default.connect_timeout_s, None),
            hop_timeout_s=_seconds(extra, "hop_timeout_s", default.hop_timeout_s, rpc_deadline_s),
            recovery_timeout_s=_seconds(extra, "recovery_timeout_s", default.recovery_timeout_s, rpc_deadline_s),
            peer_timeout_s=_seconds(extra, "peer_timeout_s", default.peer_timeout_s, None),
            spin_us=_spin(extra.get("spin_us", default.spin_us)),
            merge=_boolean("connector_extra_config.merge", extra.get("merge", default.merge)),
            ffn_tp=_count("connector_extra_config.ffn_tp", extra.get("ffn_tp", default.ffn_tp)),
            secret_file=_file(extra.get("secret_file", default.secret_file)),
            ffn_addresses=_addresses(extra.get("ffn_addresses", ())),
            a2f_dtype=_a2f_dtype(extra.get("a2f_dtype", default.a2f_dtype)),
            ignored=ignored,
        )
        config._check_together()
        return config

    def _check_together(self) -> None:
        """What no key says alone."""
        if self.recovery_timeout_s < self.hop_timeout_s:
            raise ConfigError(
                "connector_extra_config.recovery_timeout_s",
                f"{self.recovery_timeout_s:g} with hop_timeout_s {self.hop_timeout_s:g}",
                "allowed: at least hop_timeout_s, as it holds for a hop with all its repeats; set both",
            )
        if self.peer_timeout_s < MIN_PEER_TIMEOUT_S:
            raise ConfigError(
                "connector_extra_config.peer_timeout_s",
                f"{self.peer_timeout_s:g}",
                f"allowed: at least {MIN_PEER_TIMEOUT_S:g} s, as an idle peer gives a sign of life twice a second",
            )
        if self.num_ffn_ranks % self.ffn_tp:
            raise ConfigError(
                "connector_extra_config.ffn_tp",
                f"{self.ffn_tp} with num_ffn_ranks {self.num_ffn_ranks}",
                "allowed: a divisor of num_ffn_ranks, which counts workers",
            )
        if self.a2f_dtype != "auto" and self.transport != "ipc":
            raise ConfigError(
                "connector_extra_config.a2f_dtype",
                f"{self.a2f_dtype} with connector {self.connector!r}",
                "only connector 'ipc' rounds what it carries; leave it out, or use ipc",
            )
        if not self.over_tcp:
            if self.ffn_addresses:
                raise ConfigError(
                    "connector_extra_config.ffn_addresses",
                    f"addresses with connector {self.connector!r}",
                    "only connectors 'tcp' and 'nccl' have them",
                )
            return
        servers = len(self.ffn_servers)
        if self.ffn_addresses and len(self.ffn_addresses) != servers:
            raise ConfigError(
                "connector_extra_config.ffn_addresses",
                f"{len(self.ffn_addresses)} addresses for {servers} FFN servers",
                "allowed: one for each FFN server (num_ffn_ranks / ffn_tp)",
            )
        if not self.ffn_addresses and self.port + servers - 1 > 65535:
            raise ConfigError(
                "port",
                f"{self.port} for {servers} FFN servers",
                f"allowed: at most {65536 - servers}, as server i listens at port + i",
            )
        open_hosts = [host for host, _ in map(self.ffn_address, self.ffn_servers) if not is_loopback(host)]
        if open_hosts and self.secret_file is None:
            raise ConfigError(
                "connector_extra_config.secret_file",
                f"none with connector {self.connector!r} at {_show(open_hosts[0])}, which isn't a loopback address",
                "needed: a file of 16 to 4096 random bytes, the same on all hosts",
            )

    def to_dict(self) -> dict[str, object]:
        """All keys under their own names, JSON-able; ``AfdConfig.parse`` of it gives an equal configuration."""
        return {
            "role": self.role,
            "connector": self.connector,
            "async_dp": self.async_dp,
            "host": self.host,
            "port": self.port,
            "rank": self.rank,
            "num_attention_ranks": self.num_attention_ranks,
            "num_ffn_ranks": self.num_ffn_ranks,
            "compute_gate_on_attention": self.compute_gate_on_attention,
            "connector_extra_config": {
                "connect_timeout_s": self.connect_timeout_s,
                "hop_timeout_s": self.hop_timeout_s,
                "recovery_timeout_s": self.recovery_timeout_s,
                "peer_timeout_s": self.peer_timeout_s,
                "spin_us": self.spin_us,
                "merge": self.merge,
                "ffn_tp": self.ffn_tp,
                "a2f_dtype": self.a2f_dtype,
                **({"secret_file": self.secret_file} if self.secret_file is not None else {}),
                **({"ffn_addresses": list(self.ffn_addresses)} if self.ffn_addresses else {}),
            },
        }

    @property
    def transport(self) -> str:
        """What carries the hops: ``"shm"`` or ``"tcp"`` between CPU processes (afd-plugin's names mean shm), ``"ipc"``
        between GPUs of one host, ``"nccl"`` between GPUs of several."""
        return _CONNECTORS[self.connector]

    @property
    def over_tcp(self) -> bool:
        """Whether the two hosts meet at an address and a TCP port."""
        return self.transport in ("tcp", "nccl")

    @property
    def num_ranks(self) -> int:
        """How many ranks this server's own role has."""
        return self.num_attention_ranks if self.role == "attention" else self.num_ffn_ranks

    @property
    def ffn_servers(self) -> tuple[int, ...]:
        """The ranks that listen: the first worker of each FFN server, ascending."""
        return tuple(range(0, self.num_ffn_ranks, self.ffn_tp))

    def ffn_ranks_of(self, attention_rank: int, group: int = 1) -> tuple[int, ...]:
        """The FFN servers of an attention rank's own block, ascending.

        With at least as many attention ranks as FFN servers it is one, which serves a block of consecutive ranks;
        with fewer it is a block of servers. The sizes of the blocks differ by one at most.

        Args:
            attention_rank: 0 to ``num_attention_ranks`` - 1.
            group: for how many ranks, from this one on, it hops: the block is that of all of them.

        Raises:
            ConfigError: no such attention rank.
        """
        ranks, servers = self.num_attention_ranks, self.ffn_servers
        last = attention_rank + group - 1
        if not 0 <= attention_rank <= last < ranks:
            raise ConfigError("attention rank", str(last), f"allowed: 0..{ranks - 1}")
        if ranks >= len(servers):
            first, end = (rank * len(servers) // ranks for rank in (attention_rank, last))
            return servers[first : end + 1]
        return tuple(rank for i, rank in enumerate(servers) if attention_rank <= i * ranks // len(servers) <= last)

    def fallbacks_of(self, attention_rank: int, group: int = 1) -> tuple[int, ...]:
        """The other FFN servers, those nearest to the own block first; they take over when the block is lost.

        None between GPUs, where all connections share one end.
        """
        if self.transport in ("ipc", "nccl"):
            return ()
        own = self.ffn_ranks_of(attention_rank, group)
        others = (rank for rank in self.ffn_servers if rank not in own)
        return tuple(sorted(others, key=lambda rank: (min(abs(rank - home) for home in own), rank)))

    def ffn_address(self, ffn_rank: int) -> tuple[str, int]:
        """(host, port) of an FFN server over TCP: its entry of ``ffn_addresses``, or host and port + i.

        Raises:
            ConfigError: not the first rank of an FFN server.
        """
        if ffn_rank not in self.ffn_servers:
            raise ConfigError("FFN rank", str(ffn_rank), f"allowed: {', '.join(map(str, self.ffn_servers))}")
        index = ffn_rank // self.ffn_tp
        return _split(self.ffn_addresses[index]) if self.ffn_addresses else (self.host, self.port + index)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this host's alone: ``localhost``, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _show(value: object) -> str:
    return " ".join(reprlib.repr(value).split())


def _fail(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(key, _show(value), f"allowed: {allowed}")


def _canonical(mapping: object) -> dict[str, object]:
    """Aliases resolved; every key is one that AFD has."""
    if not isinstance(mapping, Mapping):
        _fail("afd", mapping, 'a mapping of keys, e.g. {"role": "attention"}')
    given: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            _fail("afd", key, "keys that are strings")
        name = _ALIASES.get(key, key)
        if name not in _KEYS:
            _unknown_key(key)
        if name in given:
            _fail(f"{spelled[name]}, {key}", value, f"one of the two, as they are the same setting; keep {name!r}")
        given[name] = value
        spelled[name] = key
    return given


def _unknown_key(key: str) -> NoReturn:
    if key in _OWN_EXTRA_KEYS or key in _FOREIGN_EXTRA_KEYS:
        raise ConfigError(_show(key), "an unknown key", "put it under connector_extra_config")
    near = difflib.get_close_matches(key, (*_KEYS, *_ALIASES), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "settings of a connector go under connector_extra_config"
    raise ConfigError(_show(key), "an unknown key", f"{hint}; allowed: {', '.join(_KEYS)}")


def _role(value: object) -> str:
    if not isinstance(value, str) or value not in ROLES:
        _fail("role", value, " or ".join(ROLES))
    return value


def _connector(value: object) -> str:
    if isinstance(value, str):
        if value in _ASCEND_CONNECTORS:
            _fail("connector", value, f"{', '.join(_CONNECTORS)} ({value} needs an Ascend NPU, which isn't supported)")
        if value in _CONNECTORS:
            return value
    _fail("connector", value, ", ".join(_CONNECTORS))


def _boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
    _fail(key, value, "true or false")


def _host(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        _fail("host", value, "a host name or an address that isn't empty")
    return value.strip()


def _port(value: object) -> int:
    number = value
    if isinstance(number, str) and number.strip().isascii() and number.strip().isdigit() and len(number) <= 16:
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
        _fail("port", value, "an integer from 1 to 65535")
    return number


def _rank(value: object, role: str, ranks: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < ranks:
        _fail("rank", value, f"an integer from 0 to {ranks - 1}, as num_{role}_ranks is {ranks}")
    return value


def _file(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value.strip() or "\0" in value):
        _fail("connector_extra_config.secret_file", value, "the path of a file")
    return value


def _a2f_dtype(value: object) -> str:
    if not isinstance(value, str) or value not in A2F_DTYPES:
        _fail("connector_extra_config.a2f_dtype", value, " or ".join(A2F_DTYPES))
    return value


def _addresses(value: object) -> tuple[str, ...]:
    key = "connector_extra_config.ffn_addresses"
    if not isinstance(value, (list, tuple)):
        _fail(key, value, 'a list of "host:port"')
    for entry in value:
        if not isinstance(entry, str) or _ADDRESS.fullmatch(entry) is None or not 1 <= _split(entry)[1] <= 65535:
            _fail(key, entry, '"host:port", an IPv6 address in brackets')
    if len(set(value)) != len(value):
        _fail(key, value, "each address once")
    return tuple(value)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(key, value, "an integer of at least 1")
    return value


def _extra(value: object, connector: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """The connectors' own keys, and the names of those that only afd-plugin's connectors use."""
    if not isinstance(value, Mapping):
        _fail("connector_extra_config", value, f"a mapping with keys among {', '.join(_OWN_EXTRA_KEYS)}")
    own: dict[str, object] = {}
    ignored: list[str] = []
    for key, entry in value.items():
        if isinstance(key, str) and key in _OWN_EXTRA_KEYS:
            own[key] = entry
        elif isinstance(key, str) and key in _FOREIGN_EXTRA_KEYS and connector in _PLUGIN_CONNECTORS:
            ignored.append(key)
        else:
            near = difflib.get_close_matches(str(key), _OWN_EXTRA_KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"connector_extra_config.{_show(key)}",
                f"an unknown key for connector {connector!r}",
                f"{hint}allowed: {', '.join(_OWN_EXTRA_KEYS)}",
            )
    return own, tuple(sorted(ignored))


def _seconds(extra: Mapping[str, object], key: str, default: float, below: float | None) -> float:
    value = extra.get(key, default)
    limit = "" if below is None else f" and below {below:g}, vLLM's deadline of a worker call"
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
        or (below is not None and value >= below)
    ):
        _fail(f"connector_extra_config.{key}", value, f"a number of seconds above 0{limit}")
    return float(value)


def _spin(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1000:
        _fail("connector_extra_config.spin_us", value, "an integer from 0 to 1000 (microseconds)")
    return value
