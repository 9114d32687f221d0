"""What lies where in a slot, how a message is spread over blocks, and the handle that a process gives to its peer.

No torch and no GPU: both sides compute the same from the same geometry, and the tests hold `hop.cu` against it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MARK_BYTES = 64
MAX_BLOCKS = 128
HEADER_AT = MARK_BYTES * MAX_BLOCKS
LINES_AT = HEADER_AT + 256
LINE_BYTES = 16
WORD_BYTES = 8
"""Payload of a packed line, the unit of a packed message."""
VECTOR_BYTES = 16
"""The unit of a bulk message."""
PAGE = 4096
MAX_PLACE = 1 << 16
MAX_ROWS = 1 << 20
MAX_HIDDEN = 1 << 20
MAX_SLOTS = 64
MAX_WORKERS = 992
"""Threads of a block beside the warp that carries a packed message's header."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
DTYPES = tuple(ITEM_BYTES)
WIRES = ("", "float8_e4m3fn")
"""How the first sender's rows may travel: as they are, or as 8-bit numbers with scales."""
GROUP = 128
"""Numbers that have a scale together."""
CHUNK = 512
"""Numbers, and their four scales, that a warp quantises or brings back at once: the unit of a quantised message."""
SCALE_BYTES = 4
MAX_NORM_WORDS = 4
"""Of a row, `WORD_BYTES` each, that a thread of a fused norm holds."""

IPC_BYTES = 64
_HANDLE = struct.Struct("<4sHBBB11IQ64s")
HANDLE_BYTES = _HANDLE.size
_MAGIC = b"AFDg"
_VERSION = 2


class LayoutError(ValueError):
    """A geometry, message or handle that can't be: what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Spread:
    """How a message of some size goes: `units` in `blocks` of `threads`, `per_block` units each.

    A unit is a word (packed), a vector (bulk), a chunk (quantised, both ways) or a row (fused norm).

    `threads` has one warp more than the workers when `packed` (it carries the header).
    """

    packed: bool
    units: int
    blocks: int
    threads: int
    per_block: int


@dataclass(frozen=True)
class Geometry:
    """One direction of a hop: `slots` slots of at most `max_rows` rows of `hidden` numbers of type `dtype`.

    Messages of at most `packed_limit` bytes travel packed (each word with its own flag), larger ones in bulk. The
    numbers of blocks and threads bound the GPU's share that a message takes. In a packed message of more than
    `packed_ungated` blocks one thread of a block waits for all. Equal on both sides.

    With `wire` "float8_e4m3fn" the messages of the side that sends first (attention) are quantised: a row travels as
    `hidden` 8-bit numbers, then a float32 scale for each `GROUP` of them, then zeros up to a multiple of 16 bytes. The
    replies travel in `dtype`. In bulk a quantised message has blocks of its own, `wire_blocks` of `wire_threads`.

    Raises:
        LayoutError: a number out of its range, an unknown dtype or wire, rows that aren't a multiple of 16 bytes
            (quantised: of 16 numbers).
    """

    max_rows: int
    hidden: int
    dtype: str = "bfloat16"
    slots: int = 1
    packed_limit: int = 256 * 1024
    packed_blocks: int = 128
    packed_workers: int = 256
    packed_ungated: int = 0
    bulk_blocks: int = 64
    bulk_threads: int = 256
    wire: str = ""
    wire_blocks: int = 128
    wire_threads: int = 512

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        for name, low, high in (
            ("max_rows", 1, MAX_ROWS),
            ("hidden", 1, MAX_HIDDEN),
            ("slots", 1, MAX_SLOTS),
            ("packed_limit", 0, 1 << 26),
            ("packed_blocks", 1, MAX_BLOCKS),
            ("packed_workers", 32, MAX_WORKERS),
            ("packed_ungated", 0, MAX_BLOCKS),
            ("bulk_blocks", 1, MAX_BLOCKS),
            ("bulk_threads", 32, 1024),
            ("wire_blocks", 1, MAX_BLOCKS),
            ("wire_threads", 32, 1024),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise LayoutError(f"{name}: expected {low} to {high}, found {value}")
        for name in ("packed_workers", "bulk_threads", "wire_threads"):
            if getattr(self, name) % 32:
                raise LayoutError(f"{name}: expected a multiple of 32, found {getattr(self, name)}")
        if self.row_bytes % VECTOR_BYTES:
            raise LayoutError(
                f"hidden: expected rows of a multiple of {VECTOR_BYTES} bytes, found {self.row_bytes} bytes "
                f"({self.hidden} of {self.dtype}); pad the rows"
            )
        if self.wire not in WIRES:
            raise LayoutError(
                f"wire: expected one of {', '.join(map(repr, WIRES))} (empty: the dtype itself), found {self.wire!r}"
            )
        if self.wire and self.dtype == "uint8":
            raise LayoutError(
                f"wire: expected floating-point rows to quantise to {self.wire}, found uint8; leave it out"
            )
        if self.wire and self.hidden % 16:
            raise LayoutError(f"hidden: expected a multiple of 16 for {self.wire}, found {self.hidden}; pad the rows")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Chunks of a row that is quantised; the last may be shorter."""
        return -(-self.hidden // CHUNK)

    @property
    def wire_row_bytes(self) -> int:
        """Bytes of a row as the first sender's messages have it."""
        return self.hidden + self.chunks * CHUNK // GROUP * SCALE_BYTES if self.wire else self.row_bytes

    @property
    def largest_packed(self) -> int:
        """Bytes of the largest message that travels packed."""
        return max(
            min(self.packed_limit, self.max_rows * size) // size * size
            for size in (self.row_bytes, self.wire_row_bytes)
        )

    @property
    def payload_at(self) -> int:
        """Offset of the rows in their dtype in a slot, in bytes."""
        return _up(LINES_AT + self.largest_packed // WORD_BYTES * LINE_BYTES)

    @property
    def wire_at(self) -> int:
        """Offset of a quantised message's bytes (in bulk) in a slot, in bytes; the slot's end where there are none."""
        return self.payload_at + _up(self.max_rows * self.row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.wire_at + (_up(self.max_rows * self.wire_row_bytes) if self.wire else 0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.slots

    def spread(self, rows: int) -> Spread:
        """How a message of `rows` rows in their dtype goes; of the geometry alone, so that both sides agree.

        Raises:
            LayoutError: no rows, or more than fit.
        """
        self._count(rows)
        size = rows * self.row_bytes
        if size <= self.packed_limit:
            return _spread(True, size // WORD_BYTES, self.packed_workers, self.packed_blocks, self.packed_workers)
        return _spread(False, size // VECTOR_BYTES, self.bulk_threads, self.bulk_blocks, self.bulk_threads)

    def wire_spread(self, rows: int) -> Spread:
        """How the first sender's quantised message goes: in chunks, one a warp at a time.

        A block of a packed one has about as many chunks as its threads can take of a plain reply at once.

        Raises:
            LayoutError: no rows, or more than fit, or nothing is quantised.
        """
        if not self.wire:
            raise LayoutError("wire: expected a format to quantise to, found none; name it in the geometry")
        self._count(rows)
        packed = rows * self.wire_row_bytes <= self.packed_limit
        most, workers = (self.packed_blocks, self.packed_workers) if packed else (self.wire_blocks, self.wire_threads)
        words = CHUNK * ITEM_BYTES[self.dtype] // WORD_BYTES
        at_once = max(1, workers // words) if packed else workers // 32
        return _spread(packed, rows * self.chunks, at_once, most, workers)

    def norm_spread(self, rows: int) -> Spread:
        """How a message goes whose rows the sending launch makes by a norm: a block has whole rows.

        In the slot it is a plain packed message: a line's place says what it is, so that any reader's spread fits.

        Raises:
            LayoutError: the message would travel in bulk or quantised, or the rows are too long or have no norm.
        """
        if self.wire or self.dtype == "uint8":
            raise LayoutError(
                f"norm: expected floating-point rows that travel as they are, found {self.dtype} "
                f"{f'sent as {self.wire}' if self.wire else 'rows'}; compute the norm first, then use send or exchange"
            )
        if not self.spread(rows).packed:
            raise LayoutError(
                f"norm: expected a message of at most {self.packed_limit} bytes (packed_limit), found {rows} rows of "
                f"{self.row_bytes} bytes; compute the norm first, then use send or exchange"
            )
        words = self.row_bytes // WORD_BYTES
        each = -(-words // MAX_WORKERS)
        if each > MAX_NORM_WORDS:
            raise LayoutError(
                f"norm: expected rows of at most {MAX_NORM_WORDS * MAX_WORKERS * WORD_BYTES} bytes, found "
                f"{self.row_bytes}; compute the norm first, then use send or exchange"
            )
        return _spread(True, rows, 1, self.packed_blocks, -(-words // each // 32) * 32)

    def _count(self, rows: int) -> None:
        if not 1 <= rows <= self.max_rows:
            raise LayoutError(f"rows: expected 1 to {self.max_rows}, found {rows}; make the buffers larger")


def place(layer: int, micro_batch: int) -> int:
    """The header's word for a layer and a micro-batch (both below 65,536)."""
    for name, value in (("layer", layer), ("micro_batch", micro_batch)):
        if not 0 <= value < MAX_PLACE:
            raise LayoutError(f"{name}: expected 0 to {MAX_PLACE - 1}, found {value}")
    return layer << 16 | micro_batch


def following(number: int) -> int:
    """The sequence number after this one: 1 to 2**32 - 1, then 1 again; 0 means "no flag"."""
    return (number + 1) % (1 << 32) or 1


def pack_handle(geometry: Geometry, initiator: bool, ipc: bytes) -> bytes:
    """What the peer needs to write into these buffers: fixed size, no pickle.

    Raises:
        LayoutError: the CUDA handle isn't 64 bytes.
    """
    if len(ipc) != IPC_BYTES:
        raise LayoutError(f"CUDA IPC handle: expected {IPC_BYTES} bytes, found {len(ipc)}")
    names = DTYPES.index(geometry.dtype), WIRES.index(geometry.wire)
    return _HANDLE.pack(_MAGIC, _VERSION, initiator, *names, *_numbers(geometry), ipc)


def unpack_handle(data: bytes, geometry: Geometry, initiator: bool) -> bytes:
    """The CUDA IPC handle in what `pack_handle` made on the other side, after holding it against one's own geometry.

    Raises:
        LayoutError: not a handle, another version, the same role, another geometry; names field and values.
    """
    if len(data) != HANDLE_BYTES:
        raise LayoutError(
            f"hop handle: expected {HANDLE_BYTES} bytes, found {len(data)}; pass on what handle() returned"
        )
    magic, version, role, dtype, wire, *numbers, ipc = _HANDLE.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise LayoutError(
            f"hop handle: expected {_MAGIC!r} version {_VERSION}, found {magic!r} version {version}; "
            "run the same afdpatch on both sides"
        )
    if role == initiator:
        raise LayoutError(
            "hop handle: expected one side that sends first and one that answers, found the same role twice"
        )
    theirs = (*(_named(names, index) for names, index in ((DTYPES, dtype), (WIRES, wire))), *numbers)
    ours = (geometry.dtype, geometry.wire, *_numbers(geometry))
    for name, expected, found in zip(_FIELDS, ours, theirs, strict=True):
        if found != expected:
            raise LayoutError(
                f"hop handle: {name}: expected {_shown(expected)} as on this side, found {_shown(found)}; "
                "make the buffers of both sides with the same numbers"
            )
    return bytes(ipc)


_FIELDS = (
    "dtype",
    "wire",
    "slots",
    "max_rows",
    "hidden",
    "packed_limit",
    "packed_blocks",
    "packed_workers",
    "packed_ungated",
    "bulk_blocks",
    "bulk_threads",
    "wire_blocks",
    "wire_threads",
    "total_bytes",
)


def _numbers(geometry: Geometry) -> tuple[int, ...]:
    return tuple(getattr(geometry, name) for name in _FIELDS[2:])


def _named(names: tuple[str, ...], index: int) -> str | int:
    return names[index] if index < len(names) else index


def _shown(value: object) -> object:
    return "none" if value == "" else value


def _spread(packed: bool, units: int, at_once: int, most: int, workers: int) -> Spread:
    """`at_once`: units of which a block has at least so many, where there are."""
    blocks = min(most, -(-units // at_once))
    per_block = -(-units // blocks)
    # The last blocks would be empty where the division rounds up: leave them out, nobody waits for them.
    blocks = -(-units // per_block)
    return Spread(packed, units, blocks, workers + 32 * packed, per_block)


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE
