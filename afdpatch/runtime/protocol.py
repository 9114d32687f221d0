"""What crosses between the roles: the 64-byte hop header, the JSON greeting, their limits. No pickle, no torch.

A connection begins with four messages of text (``secret`` has the first two, which also prove a shared secret; then
the two greetings). After them every message is a header; an ERROR has its text behind it, and where the payload isn't
in shared memory a HOP and a REPLY have it behind them: ``nbytes`` says how much.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import reprlib
import secrets
import struct
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

from afdpatch.runtime.config import A2F_DTYPES

PROTOCOL_VERSION = 3
MAGIC = b"AFDh"
HEADER = struct.Struct("<4sHBBQQIHxxIIQQ8x")
"""magic, version, kind, dtype code, sequence, step, layer, micro-batch, rows, hidden, payload offset, payload bytes."""
HEADER_BYTES = HEADER.size
MAX_GREETING_BYTES = 64 * 1024
MAX_ERROR_BYTES = 4 * 1024
DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_LAYERS = 4096
MAX_TEXT = 4096
_PAGE = 4096
_STATES = ("loading", "serving")


class Kind(enum.IntEnum):
    """What a header announces."""

    HOP = 1
    """Attention to FFN: hidden states of one layer and micro-batch lie in the A2F region."""
    REPLY = 2
    """FFN to attention: the result of the hop with the same sequence number lies in the F2A region."""
    ERROR = 3
    """FFN to attention: the hop with this sequence number failed; the text follows the header."""
    BYE = 4
    """Either way: the sender leaves on purpose."""
    READY = 5
    """FFN to attention: the weights are loaded, hops are answered from now on (greeting state was ``loading``)."""
    PING = 6
    """Attention to FFN: the sender lives and has nothing to send."""
    PONG = 7
    """FFN to attention: the answer to a PING."""


class ProtocolError(ValueError):
    """A message that breaks the protocol: the field, the value found and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"AFD protocol: {field}: found {_short(value)}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    @property
    def plain(self) -> str:
        """The text in words of ours alone: anybody may have sent what was found, so only a number of it is shown."""
        found = _short(self.value) if isinstance(self.value, int) else "something else"
        return f"AFD protocol: {self.field}: found {found}; allowed: {self.allowed}"

    @property
    def other_version(self) -> tuple[Mismatch, ...]:
        """The mismatch, when the message is of another version of the protocol."""
        is_one = self.field == "protocol" and type(self.value) is int and 0 <= self.value < 1 << 16
        return (Mismatch("protocol", self.allowed, str(self.value)),) if is_one else ()


def _short(value: object) -> str:
    return " ".join(reprlib.repr(value).split())


class Header(NamedTuple):
    """A hop header, decoded.

    ``nbytes`` are the payload's (an ERROR's: the text's). ``offset`` counts bytes from the start of the shared memory;
    it is 0 where the payload follows the header.
    """

    kind: int
    dtype: int
    sequence: int
    step: int
    layer: int
    micro_batch: int
    rows: int
    hidden: int
    offset: int
    nbytes: int

    def pack_into(self, buffer: bytearray) -> None:
        """Write the 64 bytes at the start of ``buffer``."""
        HEADER.pack_into(buffer, 0, MAGIC, PROTOCOL_VERSION, *self)

    def pack(self) -> bytes:
        """The 64 bytes."""
        return HEADER.pack(MAGIC, PROTOCOL_VERSION, *self)

    @classmethod
    def unpack(cls, message: bytes | bytearray | memoryview) -> Header:
        """Decode the first 64 bytes of a message; checks magic, version and kind, not the limits.

        Raises:
            ProtocolError: too short, other magic, other version, unknown kind.
        """
        if len(message) < HEADER_BYTES:
            raise ProtocolError("header length", len(message), f"{HEADER_BYTES} bytes")
        magic, version, *rest = HEADER.unpack_from(message)
        if magic != MAGIC:
            raise ProtocolError("magic", magic, repr(MAGIC))
        if version != PROTOCOL_VERSION:
            raise ProtocolError("version", version, str(PROTOCOL_VERSION))
        header = cls._make(rest)
        if not Kind.HOP <= header.kind <= Kind.PONG:
            raise ProtocolError("kind", header.kind, ", ".join(f"{kind.value} ({kind.name})" for kind in Kind))
        return header


def control(kind: Kind, sequence: int = 0) -> bytes:
    """A header without payload (BYE, READY, PING, PONG)."""
    return Header(kind, 0, sequence, 0, 0, 0, 0, 0, 0, 0).pack()


def error_message(hop: Header, text: str) -> bytes:
    """The ERROR answer to ``hop``; the text is cut to 4 KiB of UTF-8."""
    data = clip(text, MAX_ERROR_BYTES)
    return hop._replace(kind=Kind.ERROR, offset=0, nbytes=len(data)).pack() + data


def error_text(message: bytes | bytearray | memoryview) -> str:
    """The text behind an ERROR header."""
    return bytes(message[HEADER_BYTES : HEADER_BYTES + MAX_ERROR_BYTES]).decode("utf-8", "replace")


def clip(text: str, limit: int) -> bytes:
    """UTF-8 of ``text``, at most ``limit`` bytes, never cut inside a character."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data
    return data[:limit].decode("utf-8", "ignore").encode()


@functools.cache
def instance_of(pid: int) -> str:
    """A random name of the process with this pid, the same each time it is asked for within the process."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Greeting:
    """Who a worker is and what it will send or accept; exchanged once for each connection, first before weights load.

    ``layers`` are the indices of the decoder layers whose FFN is remote, ascending. ``max_rows`` is the most rows of
    one hop. ``dtype`` is torch's name of the hidden states' type without the ``torch.``. Digests are hex text.
    ``tensor_parallel`` is the FFN server's size, which attention expects. ``a2f_dtype`` is how hidden states travel to
    the FFN: in ``dtype`` ("auto"), or rounded. ``communicator`` is the name of
    NCCL's, 256 digits from the attention side with the connector `nccl`, and empty elsewhere. ``instance`` names the
    process that runs: a rank that connects again takes the place of its own old connection, another process that claims
    the rank doesn't.

    Raises:
        ProtocolError: a field of the wrong type or out of its limits.
    """

    role: str
    rank: int
    manifest_digest: str
    vllm_version: str
    model: str
    config_digest: str
    checkpoint: str
    dtype: str
    hidden_size: int
    layers: tuple[int, ...]
    max_rows: int
    micro_batches: int
    num_attention_ranks: int
    num_ffn_ranks: int
    tensor_parallel: int = 1
    graph_mode: str = "none"
    a2f_dtype: str = "auto"
    communicator: str = ""
    instance: str = field(default_factory=lambda: instance_of(os.getpid()))
    state: str = "loading"
    protocol: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        _integer("protocol", self.protocol, 0, 65535)
        _choice("role", self.role, ("attention", "ffn"))
        _choice("dtype", self.dtype, tuple(DTYPE_CODES))
        _choice("state", self.state, _STATES)
        _choice("a2f_dtype", self.a2f_dtype, A2F_DTYPES)
        for name in ("manifest_digest", "vllm_version", "model", "config_digest", "checkpoint", "graph_mode"):
            _text(name, getattr(self, name))
        _integer("hidden_size", self.hidden_size, 1, 1 << 17)
        _integer("max_rows", self.max_rows, 1, 1 << 20)
        _integer("micro_batches", self.micro_batches, 1, 8)
        _integer("num_attention_ranks", self.num_attention_ranks, 1, 4096)
        _integer("num_ffn_ranks", self.num_ffn_ranks, 1, 4096)
        _integer("tensor_parallel", self.tensor_parallel, 1, 4096)
        _hex("instance", self.instance)
        if self.communicator != "":
            _hex("communicator", self.communicator, 256, 256)
        own = self.num_attention_ranks if self.role == "attention" else self.num_ffn_ranks
        _integer("rank", self.rank, 0, own - 1)
        if not isinstance(self.layers, tuple) or not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ProtocolError("layers", self.layers, f"a list of 1 to {MAX_LAYERS} layer indices")
        for layer in self.layers:
            _integer("layers", layer, 0, 65535)
        if list(self.layers) != sorted(set(self.layers)):
            raise ProtocolError("layers", self.layers, "ascending indices, each once")

    def encode(self) -> bytes:
        """The greeting as one JSON message.

        Raises:
            ProtocolError: longer than 64 KiB.
        """
        message = json.dumps(asdict(self), separators=(",", ":")).encode()
        if len(message) > MAX_GREETING_BYTES:
            raise ProtocolError("greeting length", len(message), f"at most {MAX_GREETING_BYTES} bytes")
        return message

    @classmethod
    def decode(cls, message: bytes) -> Greeting:
        """Read a greeting; anything that isn't one is a ProtocolError."""
        return cls._from_json(json_object(message))

    @classmethod
    def _from_json(cls, data: dict[str, object]) -> Greeting:
        # Another protocol version may have other fields: name the version, not the first field that differs.
        if data.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError("protocol", data.get("protocol"), str(PROTOCOL_VERSION))
        names = {field.name for field in fields(cls)}
        if data.keys() != names:
            raise ProtocolError("greeting keys", sorted(data.keys() ^ names), f"exactly {', '.join(sorted(names))}")
        layers = data["layers"]
        if not isinstance(layers, list):
            raise ProtocolError("layers", layers, "a list of layer indices")
        return cls(**{**data, "layers": tuple(layers)})  # type: ignore[arg-type]


class Mismatch(NamedTuple):
    """One field on which two greetings disagree, with both values as text."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs}"


_EQUAL = (
    "protocol",
    "manifest_digest",
    "vllm_version",
    "model",
    "config_digest",
    "checkpoint",
    "dtype",
    "hidden_size",
    "layers",
    "num_attention_ranks",
    "num_ffn_ranks",
    "tensor_parallel",
    "graph_mode",
    "a2f_dtype",
)


def compare(ours: Greeting, theirs: Greeting) -> list[Mismatch]:
    """The fields on which two greetings of the two roles can't work together; empty when they can.

    The roles must differ; the attention side's ``max_rows`` and ``micro_batches`` must not pass the FFN side's;
    ``rank``, ``instance``, ``communicator`` and ``state`` are each side's own; everything else must be equal.
    """
    found: list[Mismatch] = []
    if ours.role == theirs.role:
        found.append(Mismatch("role", ours.role, theirs.role))
    for name in _EQUAL:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            found.append(Mismatch(name, _value(mine), _value(other)))
    attention, ffn = (ours, theirs) if ours.role == "attention" else (theirs, ours)
    for name in ("max_rows", "micro_batches"):
        if getattr(attention, name) > getattr(ffn, name):
            found.append(Mismatch(name, _value(getattr(ours, name)), _value(getattr(theirs, name))))
    return found


def advice(found: Sequence[Mismatch]) -> str:
    """What to do about mismatches."""
    rows = any(mismatch.field == "max_rows" for mismatch in found)
    more = "; give the FFN server at least the attention server's --max-num-batched-tokens" if rows else ""
    return f"start both alike, with one afdpatch{more}"


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True)
class Refusal:
    """The FFN's answer to a peer that it doesn't take; in ``mismatches`` *ours* is the FFN's value.

    ``retry``: the reason passes (draining, too many at once), so the peer may try again until its deadline.
    """

    reason: str
    mismatches: tuple[Mismatch, ...] = ()
    retry: bool = False

    def encode(self) -> bytes:
        """The refusal as one JSON message."""
        pairs = [[clip(text, 256).decode() for text in mismatch] for mismatch in self.mismatches[:32]]
        reason = clip(self.reason, 2048).decode()
        return json.dumps({"refused": reason, "mismatches": pairs, "retry": self.retry}).encode()


def decode_answer(message: bytes) -> Greeting | Refusal:
    """Read the FFN's answer to a greeting.

    Raises:
        ProtocolError: neither a greeting nor a refusal.
    """
    data = json_object(message)
    return refusal_of(data) or Greeting._from_json(data)


def refusal_of(data: dict[str, object]) -> Refusal | None:
    """The refusal that a JSON object is, None when it is something else.

    Raises:
        ProtocolError: a refusal with fields of other types.
    """
    if "refused" not in data:
        return None
    # A refusal may come from another version: what it doesn't say has its default.
    reason, pairs, retry = data["refused"], data.get("mismatches", []), data.get("retry", False)
    if not isinstance(reason, str) or not isinstance(pairs, list) or not isinstance(retry, bool):
        raise ProtocolError("refusal", data, "a reason, a list of mismatches, and whether to try again")
    mismatches = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 3 or not all(isinstance(text, str) for text in pair):
            raise ProtocolError("mismatches", pair, "field, our value and their value, as text")
        mismatches.append(Mismatch(*pair))
    return Refusal(reason, tuple(mismatches), retry)


@dataclass(frozen=True)
class Layout:
    """Where the payloads lie in shared memory: for each micro-batch an A2F region, then an F2A region, page-aligned."""

    max_rows: int
    hidden: int
    micro_batches: int
    dtype: str

    @classmethod
    def of(cls, greeting: Greeting) -> Layout:
        """The layout that the attention side's greeting implies."""
        return cls(greeting.max_rows, greeting.hidden_size, greeting.micro_batches, greeting.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def region_bytes(self) -> int:
        """Bytes from one region to the next."""
        return -(-self.max_rows * self.row_bytes // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        """Size of the shared memory in bytes."""
        return 2 * self.micro_batches * self.region_bytes

    def a2f_offset(self, micro_batch: int) -> int:
        """Start of the attention-to-FFN region in bytes."""
        return 2 * micro_batch * self.region_bytes

    def f2a_offset(self, micro_batch: int) -> int:
        """Start of the FFN-to-attention region in bytes."""
        return (2 * micro_batch + 1) * self.region_bytes


class HopLimits:
    """What a HOP header of one peer may say; built once for each connection from its greeting.

    Args:
        greeting: the attention side's.
        inline: the payload follows the header, so that its offset is 0.
    """

    def __init__(self, greeting: Greeting, *, inline: bool = False) -> None:
        layout = Layout.of(greeting)
        self._layers: Collection[int] = frozenset(greeting.layers)
        self._dtype = DTYPE_CODES[greeting.dtype]
        self._dtype_name = greeting.dtype
        self._hidden = greeting.hidden_size
        self._max_rows = greeting.max_rows
        self._row_bytes = layout.row_bytes
        indices = range(greeting.micro_batches)
        self._offsets = tuple(0 if inline else layout.a2f_offset(index) for index in indices)

    def check(self, header: Header) -> None:
        """Hold a HOP header against the greeting.

        Raises:
            ProtocolError: the first field that is out of its limits.
        """
        if header.kind != Kind.HOP:
            raise ProtocolError("kind", header.kind, f"{Kind.HOP.value} (HOP)")
        if header.dtype != self._dtype:
            raise ProtocolError("dtype", header.dtype, f"{self._dtype} ({self._dtype_name})")
        if header.hidden != self._hidden:
            raise ProtocolError("hidden", header.hidden, str(self._hidden))
        if not 1 <= header.rows <= self._max_rows:
            raise ProtocolError("rows", header.rows, f"1..{self._max_rows}")
        if header.layer not in self._layers:
            raise ProtocolError(
                "layer", header.layer, f"a layer of the greeting ({_value(tuple(sorted(self._layers)))})"
            )
        if header.micro_batch >= len(self._offsets):
            raise ProtocolError("micro_batch", header.micro_batch, f"0..{len(self._offsets) - 1}")
        if header.offset != self._offsets[header.micro_batch]:
            raise ProtocolError("payload offset", header.offset, str(self._offsets[header.micro_batch]))
        if header.nbytes != header.rows * self._row_bytes:
            raise ProtocolError("payload bytes", header.nbytes, str(header.rows * self._row_bytes))


def json_object(message: bytes) -> dict[str, object]:
    """A JSON object of at most 64 KiB; anything else is a ProtocolError."""
    if len(message) > MAX_GREETING_BYTES:
        raise ProtocolError("greeting length", len(message), f"at most {MAX_GREETING_BYTES} bytes")
    try:
        data = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("greeting", bytes(message[:32]), "a JSON object") from error
    if not isinstance(data, dict):
        raise ProtocolError("greeting", data, "a JSON object")
    return data


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ProtocolError(name, value, f"an integer from {low} to {high}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ProtocolError(name, value, " or ".join(allowed))


def _hex(name: str, value: object, least: int = 16, most: int = 64) -> None:
    if not isinstance(value, str) or not least <= len(value) <= most or not set(value) <= set("0123456789abcdef"):
        raise ProtocolError(name, value, f"{least} to {most} hexadecimal digits in lower case")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ProtocolError(name, value, f"text of at most {MAX_TEXT} characters")
