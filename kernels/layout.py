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
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
DTYPES = tuple(ITEM_BYTES)

IPC_BYTES = 64
_HANDLE = struct.Struct("<4sHBB9IQ64s")
HANDLE_BYTES = _HANDLE.size
_MAGIC = b"AFDg"
_VERSION = 1


class LayoutError(ValueError):
    """A geometry, message or handle that can't be: what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Spread:
    """How a message of some size goes: `units` in `blocks` of `threads`, `per_block` units each.

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

    Raises:
        LayoutError: a number out of its range, an unknown dtype, rows that aren't a multiple of 16 bytes.
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

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        for name, low, high in (
            ("max_rows", 1, MAX_ROWS),
            ("hidden", 1, MAX_HIDDEN),
            ("slots", 1, MAX_SLOTS),
            ("packed_limit", 0, 1 << 26),
            ("packed_blocks", 1, MAX_BLOCKS),
            ("packed_workers", 32, 992),
            ("packed_ungated", 0, MAX_BLOCKS),
            ("bulk_blocks", 1, MAX_BLOCKS),
            ("bulk_threads", 32, 1024),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise LayoutError(f"{name}: expected {low} to {high}, found {value}")
        for name in ("packed_workers", "bulk_threads"):
            if getattr(self, name) % 32:
                raise LayoutError(f"{name}: expected a multiple of 32, found {getattr(self, name)}")
        if self.row_bytes % VECTOR_BYTES:
            raise LayoutError(
                f"hidden: expected rows of a multiple of {VECTOR_BYTES} bytes, found {self.row_bytes} bytes "
                f"({self.hidden} of {self.dtype}); pad the rows"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * ITEM_BYTES[self.dtype]

    @property
    def largest_packed(self) -> int:
        """Bytes of the largest message that travels packed."""
        return min(self.packed_limit, self.max_rows * self.row_bytes) // self.row_bytes * self.row_bytes

    @property
    def payload_at(self) -> int:
        """Offset of the payload in a slot, in bytes."""
        return _up(LINES_AT + self.largest_packed // WORD_BYTES * LINE_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.payload_at + _up(self.max_rows * self.row_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.slots

    def spread(self, rows: int) -> Spread:
        """How a message of `rows` rows goes; a function of the geometry alone, so that both sides agree.

        Raises:
            LayoutError: no rows, or more than fit.
        """
        if not 1 <= rows <= self.max_rows:
            raise LayoutError(f"rows: expected 1 to {self.max_rows}, found {rows}; make the buffers larger")
        size = rows * self.row_bytes
        packed = size <= self.packed_limit
        unit, most, workers = (
            (WORD_BYTES, self.packed_blocks, self.packed_workers)
            if packed
            else (VECTOR_BYTES, self.bulk_blocks, self.bulk_threads)
        )
        units = size // unit
        blocks = min(most, -(-units // workers))
        per_block = -(-units // blocks)
        # The last blocks would be empty where the division rounds up: leave them out, nobody waits for them.
        blocks = -(-units // per_block)
        return Spread(packed, units, blocks, workers + 32 * packed, per_block)


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
    return _HANDLE.pack(_MAGIC, _VERSION, DTYPES.index(geometry.dtype), initiator, *_numbers(geometry), ipc)


def unpack_handle(data: bytes, geometry: Geometry, initiator: bool) -> bytes:
    """The CUDA IPC handle in what `pack_handle` made on the other side, after holding it against one's own geometry.

    Raises:
        LayoutError: not a handle, another version, the same role, another geometry; names field and values.
    """
    if len(data) != HANDLE_BYTES:
        raise LayoutError(
            f"hop handle: expected {HANDLE_BYTES} bytes, found {len(data)}; pass on what handle() returned"
        )
    magic, version, dtype, role, *numbers, ipc = _HANDLE.unpack(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise LayoutError(
            f"hop handle: expected {_MAGIC!r} version {_VERSION}, found {magic!r} version {version}; "
            "run the same afdpatch on both sides"
        )
    if role == initiator:
        raise LayoutError(
            "hop handle: expected one side that sends first and one that answers, found the same role twice"
        )
    theirs = (DTYPES[dtype] if dtype < len(DTYPES) else dtype, *numbers)
    for name, expected, found in zip(_FIELDS, (geometry.dtype, *_numbers(geometry)), theirs, strict=True):
        if found != expected:
            raise LayoutError(
                f"hop handle: {name}: expected {expected} as on this side, found {found}; "
                "make the buffers of both sides with the same numbers"
            )
    return bytes(ipc)


_FIELDS = (
    "dtype",
    "slots",
    "max_rows",
    "hidden",
    "packed_limit",
    "packed_blocks",
    "packed_workers",
    "packed_ungated",
    "bulk_blocks",
    "bulk_threads",
    "total_bytes",
)


def _numbers(geometry: Geometry) -> tuple[int, ...]:
    return tuple(getattr(geometry, name) for name in _FIELDS[1:])


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE
