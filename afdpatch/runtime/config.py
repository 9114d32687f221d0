"""The keys of ``additional_config["afd"]``, as afd-plugin has them, so that its command lines run."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

ROLES = ("attention", "ffn")
RPC_DEADLINE_S = 300.0
"""vLLM's default deadline of one worker call (``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``), in seconds."""

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
    "num_attention_ranks",
    "num_ffn_ranks",
    "compute_gate_on_attention",
    "connector_extra_config",
)
# connector name -> transport that carries its hops here
_CONNECTORS = {"shm": "shm", "ipc": "ipc", "P2pNcclAFDConnector": "shm", "GpuAsyncAFDConnector": "shm"}
_ASYNC_CONNECTORS = ("GpuAsyncAFDConnector",)
_ASCEND_CONNECTORS = ("CAMP2pAFDConnector", "CAMAsyncAFDConnector", "P2pHcclAFDConnector", "WindowAFDConnector")
_OWN_EXTRA_KEYS = ("connect_timeout_s", "hop_timeout_s", "spin_us")
# Keys of afd-plugin's own connectors: they mean nothing to shared memory, but a command line that has them must run.
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
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    compute_gate_on_attention: bool = False
    connect_timeout_s: float = 600.0
    hop_timeout_s: float = 60.0
    spin_us: int = 50
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Keys of ``connector_extra_config`` that afd-plugin's connectors know and that have no effect here, sorted."""

    @classmethod
    def parse(cls, mapping: object, *, rpc_deadline_s: float = RPC_DEADLINE_S) -> AfdConfig:
        """Read ``additional_config["afd"]``.

        Args:
            mapping: a mapping from str keys, as JSON gives it.
            rpc_deadline_s: vLLM's deadline of a worker call in seconds; ``hop_timeout_s`` must be shorter.

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
        attention_ranks = _count("num_attention_ranks", given.get("num_attention_ranks", default.num_attention_ranks))
        ffn_ranks = _count("num_ffn_ranks", given.get("num_ffn_ranks", default.num_ffn_ranks))
        if ffn_ranks > attention_ranks:
            raise ConfigError(
                "num_ffn_ranks",
                f"{ffn_ranks} with num_attention_ranks {attention_ranks}",
                "allowed: at most num_attention_ranks, since an FFN rank without an attention rank has nothing to do",
            )
        extra, ignored = _extra(given.get("connector_extra_config", {}), connector)
        return cls(
            role=_role(given.get("role", default.role)),
            connector=connector,
            async_dp=async_dp,
            host=_host(given.get("host", default.host)),
            port=_port(given.get("port", default.port)),
            num_attention_ranks=attention_ranks,
            num_ffn_ranks=ffn_ranks,
            compute_gate_on_attention=_boolean(
                "compute_gate_on_attention", given.get("compute_gate_on_attention", default.compute_gate_on_attention)
            ),
            connect_timeout_s=_seconds(extra, "connect_timeout_s", default.connect_timeout_s, None),
            hop_timeout_s=_seconds(extra, "hop_timeout_s", default.hop_timeout_s, rpc_deadline_s),
            spin_us=_spin(extra.get("spin_us", default.spin_us)),
            ignored=ignored,
        )

    def to_dict(self) -> dict[str, object]:
        """All keys under their own names, JSON-able; ``AfdConfig.parse`` of it gives an equal configuration."""
        return {
            "role": self.role,
            "connector": self.connector,
            "async_dp": self.async_dp,
            "host": self.host,
            "port": self.port,
            "num_attention_ranks": self.num_attention_ranks,
            "num_ffn_ranks": self.num_ffn_ranks,
            "compute_gate_on_attention": self.compute_gate_on_attention,
            "connector_extra_config": {
                "connect_timeout_s": self.connect_timeout_s,
                "hop_timeout_s": self.hop_timeout_s,
                "spin_us": self.spin_us,
            },
        }

    @property
    def transport(self) -> str:
        """What carries the hops: ``"shm"`` between CPU processes of one host, ``"ipc"`` between GPUs of one host."""
        return _CONNECTORS[self.connector]

    @property
    def num_ranks(self) -> int:
        """How many ranks this server's own role has."""
        return self.num_attention_ranks if self.role == "attention" else self.num_ffn_ranks

    def ffn_rank_of(self, attention_rank: int) -> int:
        """The FFN rank that serves an attention rank: consecutive blocks whose sizes differ by one at most."""
        if not 0 <= attention_rank < self.num_attention_ranks:
            raise ConfigError("attention rank", str(attention_rank), f"allowed: 0..{self.num_attention_ranks - 1}")
        return attention_rank * self.num_ffn_ranks // self.num_attention_ranks

    def attention_ranks_of(self, ffn_rank: int) -> tuple[int, ...]:
        """The attention ranks that an FFN rank serves, ascending."""
        if not 0 <= ffn_rank < self.num_ffn_ranks:
            raise ConfigError("FFN rank", str(ffn_rank), f"allowed: 0..{self.num_ffn_ranks - 1}")
        return tuple(rank for rank in range(self.num_attention_ranks) if self.ffn_rank_of(rank) == ffn_rank)


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


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _fail(key, value, "an integer of at least 1")
    return value


def _extra(value: object, connector: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """The keys for shared memory, and the names of those that only afd-plugin's connectors use."""
    if not isinstance(value, Mapping):
        _fail("connector_extra_config", value, f"a mapping with keys among {', '.join(_OWN_EXTRA_KEYS)}")
    own: dict[str, object] = {}
    ignored: list[str] = []
    for key, entry in value.items():
        if isinstance(key, str) and key in _OWN_EXTRA_KEYS:
            own[key] = entry
        elif isinstance(key, str) and key in _FOREIGN_EXTRA_KEYS and connector not in ("shm", "ipc"):
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
