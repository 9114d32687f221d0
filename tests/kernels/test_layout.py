"""The layout of a slot, the spread of a message, the handle and the reference: all on the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afdpatch.kernels import build, hop, layout, reference
from afdpatch.kernels.layout import Geometry, LayoutError

GEOMETRIES = st.builds(
    Geometry,
    max_rows=st.integers(1, 600),
    hidden=st.integers(1, 300).map(lambda n: 16 * n),
    dtype=st.sampled_from(layout.DTYPES),
    slots=st.integers(1, 5),
    packed_limit=st.integers(0, 1 << 20),
    packed_blocks=st.integers(1, layout.MAX_BLOCKS),
    packed_workers=st.integers(1, 31).map(lambda n: 32 * n),
    bulk_blocks=st.integers(1, layout.MAX_BLOCKS),
    bulk_threads=st.integers(1, 32).map(lambda n: 32 * n),
    wire_blocks=st.integers(1, layout.MAX_BLOCKS),
    wire_threads=st.integers(1, 32).map(lambda n: 32 * n),
)
QUANTISED = GEOMETRIES.map(
    lambda g: dataclasses.replace(g, dtype="bfloat16" if g.dtype == "uint8" else g.dtype, wire="float8_e4m3fn")
)


@given(GEOMETRIES, st.data())
def test_every_unit_has_one_block_and_no_block_is_empty(geometry: Geometry, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, geometry.max_rows))
    spread = geometry.spread(rows)
    unit = layout.WORD_BYTES if spread.packed else layout.VECTOR_BYTES
    assert spread.units * unit == rows * geometry.row_bytes
    assert (spread.blocks - 1) * spread.per_block < spread.units <= spread.blocks * spread.per_block
    assert spread.blocks <= (geometry.packed_blocks if spread.packed else geometry.bulk_blocks)
    assert spread.threads % 32 == 0 and spread.threads <= 1024
    assert spread.packed == (rows * geometry.row_bytes <= geometry.packed_limit)


@given(QUANTISED, st.data())
def test_every_chunk_has_one_block_and_no_block_is_empty(geometry: Geometry, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, geometry.max_rows))
    spread = geometry.wire_spread(rows)
    assert spread.units == rows * -(-geometry.hidden // 512)
    assert (spread.blocks - 1) * spread.per_block < spread.units <= spread.blocks * spread.per_block
    assert spread.blocks <= (geometry.packed_blocks if spread.packed else geometry.wire_blocks)
    assert spread.threads == (geometry.packed_workers + 32 if spread.packed else geometry.wire_threads)
    assert spread.packed == (rows * geometry.wire_row_bytes <= geometry.packed_limit)
    assert spread.packed or not geometry.spread(rows).packed  # a reply is never the only one that is packed
    assert geometry.spread(rows) == dataclasses.replace(geometry, wire="").spread(rows)


@given(GEOMETRIES, st.data())
def test_a_fused_norm_has_whole_rows_in_a_block_and_holds_them(geometry: Geometry, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, geometry.max_rows))
    if geometry.dtype == "uint8" or not geometry.spread(rows).packed:
        with pytest.raises(LayoutError, match=r"norm: expected .*; compute the norm first, then use send or exchange"):
            geometry.norm_spread(rows)
        return
    spread = geometry.norm_spread(rows)
    assert (spread.packed, spread.units) == (True, rows)
    assert (spread.blocks - 1) * spread.per_block < rows <= spread.blocks * spread.per_block
    workers = spread.threads - 32
    assert workers % 32 == 0 and 32 <= workers <= layout.MAX_WORKERS
    assert workers * layout.MAX_NORM_WORDS * layout.WORD_BYTES >= geometry.row_bytes


@given(GEOMETRIES | QUANTISED)
def test_the_parts_of_a_slot_do_not_meet(geometry: Geometry) -> None:
    assert layout.MARK_BYTES * layout.MAX_BLOCKS <= layout.HEADER_AT < layout.HEADER_AT + 16 <= layout.LINES_AT
    assert layout.LINES_AT % 16 == 0
    for size in (geometry.row_bytes, geometry.wire_row_bytes):
        packed = min(geometry.max_rows, geometry.packed_limit // size) * size
        assert layout.LINES_AT + packed // layout.WORD_BYTES * layout.LINE_BYTES <= geometry.payload_at
    assert geometry.payload_at + geometry.max_rows * geometry.row_bytes <= geometry.wire_at
    assert geometry.wire_at + bool(geometry.wire) * geometry.max_rows * geometry.wire_row_bytes <= geometry.slot_bytes
    assert geometry.wire_row_bytes % 16 == 0
    assert geometry.payload_at % layout.PAGE == geometry.wire_at % layout.PAGE == geometry.slot_bytes % layout.PAGE == 0
    assert geometry.total_bytes == geometry.slots * geometry.slot_bytes


@given(GEOMETRIES | QUANTISED, st.binary(min_size=64, max_size=64), st.booleans())
def test_a_handle_crosses_between_the_two_roles_only(geometry: Geometry, ipc: bytes, initiator: bool) -> None:
    handle = layout.pack_handle(geometry, initiator, ipc)
    assert len(handle) == layout.HANDLE_BYTES
    assert layout.unpack_handle(handle, geometry, not initiator) == ipc
    with pytest.raises(LayoutError, match="same role twice"):
        layout.unpack_handle(handle, geometry, initiator)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_rows", 65),
        ("hidden", 4096),
        ("dtype", "float16"),
        ("slots", 3),
        ("packed_limit", 0),
        ("packed_blocks", 32),
        ("packed_workers", 128),
        ("packed_ungated", 5),
        ("bulk_blocks", 32),
        ("bulk_threads", 512),
        ("wire_blocks", 64),
        ("wire_threads", 256),
    ],
)
def test_a_handle_of_another_geometry_is_refused_by_name(field: str, value: object) -> None:
    ours = Geometry(64, 2048, slots=2)
    theirs = dataclasses.replace(ours, **{field: value})
    handle = layout.pack_handle(theirs, True, bytes(64))
    with pytest.raises(LayoutError, match=f"{field}: expected {getattr(ours, field)} as on this side, found {value};"):
        layout.unpack_handle(handle, ours, False)


@pytest.mark.parametrize(("ours", "theirs"), [("", "float8_e4m3fn"), ("float8_e4m3fn", "")])
def test_a_handle_of_another_wire_format_is_refused_by_name(ours: str, theirs: str) -> None:
    handle = layout.pack_handle(Geometry(64, 2048, wire=theirs), True, bytes(64))
    text = f"wire: expected {ours or 'none'} as on this side, found {theirs or 'none'};"
    with pytest.raises(LayoutError, match=text):
        layout.unpack_handle(handle, Geometry(64, 2048, wire=ours), False)


def test_a_damaged_handle_is_refused() -> None:
    geometry = Geometry(64, 2048)
    handle = layout.pack_handle(geometry, True, bytes(64))
    for damaged, text in (
        (handle[:-1], "bytes, found"),
        (b"XXXX" + handle[4:], "run the same afdpatch"),
        (handle[:4] + b"\1\0" + handle[6:], "version 2, found b'AFDg' version 1; run the same afdpatch"),
        (handle[:7] + b"\t" + handle[8:], "dtype: expected bfloat16 as on this side, found 9"),
        (b"", "found 0"),
    ):
        with pytest.raises(LayoutError, match=text):
            layout.unpack_handle(damaged, geometry, False)
    with pytest.raises(LayoutError, match="expected 64 bytes, found 3"):
        layout.pack_handle(geometry, True, b"abc")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"hidden": 4}, "multiple of 16 bytes, found 8 bytes"),
        ({"dtype": "int4"}, "dtype: expected one of bfloat16"),
        ({"max_rows": 0}, "max_rows: expected 1 to"),
        ({"slots": 65}, "slots: expected 1 to 64, found 65"),
        ({"bulk_threads": 100}, "bulk_threads: expected a multiple of 32, found 100"),
        ({"packed_workers": 1024}, "packed_workers: expected 32 to 992"),
        ({"bulk_blocks": 129}, "bulk_blocks: expected 1 to 128"),
        ({"wire_threads": 1056}, "wire_threads: expected 32 to 1024"),
        ({"wire_threads": 40}, "wire_threads: expected a multiple of 32, found 40"),
        ({"wire": "int4"}, "wire: expected one of '', 'float8_e4m3fn' .*, found 'int4'"),
        ({"wire": "float8_e4m3fn", "dtype": "uint8"}, "floating-point rows .*, found uint8"),
        ({"wire": "float8_e4m3fn", "hidden": 72}, "a multiple of 16 for float8_e4m3fn, found 72; pad the rows"),
    ],
)
def test_what_cannot_be_is_refused(numbers: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        Geometry(**({"max_rows": 8, "hidden": 64} | numbers))  # type: ignore[arg-type]


def test_rows_and_places_have_limits() -> None:
    for rows in (0, 9):
        with pytest.raises(LayoutError, match=f"rows: expected 1 to 8, found {rows}"):
            Geometry(8, 64).spread(rows)
        with pytest.raises(LayoutError, match=f"rows: expected 1 to 8, found {rows}"):
            Geometry(8, 64, wire="float8_e4m3fn").wire_spread(rows)
    with pytest.raises(LayoutError, match="expected a format to quantise to, found none; name it in the geometry"):
        Geometry(8, 64).wire_spread(1)
    with pytest.raises(LayoutError, match=r"norm: expected .* as they are, found bfloat16 sent as float8_e4m3fn"):
        Geometry(8, 64, wire="float8_e4m3fn").norm_spread(1)
    with pytest.raises(LayoutError, match=r"norm: expected rows of at most 31744 bytes, found 31776"):
        Geometry(1, 15888).norm_spread(1)
    assert layout.place(26, 1) == 26 << 16 | 1
    for wrong in ((-1, 0), (0, 65536)):
        with pytest.raises(LayoutError, match="expected 0 to 65535"):
            layout.place(*wrong)
    assert [layout.following(n) for n in (0, 1, (1 << 32) - 1)] == [1, 2, 1]


@settings(deadline=None)
@given(GEOMETRIES, st.integers(1, (1 << 32) - 1), st.integers(0, 65535), st.integers(0, 65535), st.data())
def test_the_reference_reads_what_it_writes(
    geometry: Geometry, number: int, layer: int, micro_batch: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, min(geometry.max_rows, 16)))
    sent = torch.randint(0, 256, (rows, geometry.row_bytes), dtype=torch.uint8)
    sent = sent.view(getattr(torch, geometry.dtype))
    slot = torch.zeros(geometry.slot_bytes, dtype=torch.uint8)
    with pytest.raises(reference.NotThere):
        reference.read(slot, geometry, rows, number, layer, micro_batch)
    reference.write(slot, geometry, sent, number, layer, micro_batch)
    for other in ((number % 7 + 1 if number != number % 7 + 1 else 99, layer), (number, (layer + 1) % 65536)):
        with pytest.raises(reference.NotThere):
            reference.read(slot, geometry, rows, *other, micro_batch)
    got = reference.read(slot, geometry, rows, number, layer, micro_batch)
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
    with pytest.raises(reference.NotThere):  # the flags are reset
        reference.read(slot, geometry, rows, number, layer, micro_batch)


def test_the_cuda_source_has_the_same_numbers() -> None:
    source = build.SOURCE.read_text() + build.ROWWISE.read_text()
    assert '#include "rowwise.cu"' in source
    constants = dict(re.findall(r"constexpr uint32_t k(\w+) = (\d+);", source))
    assert int(constants["MarkBytes"]) == layout.MARK_BYTES
    assert int(constants["HeaderAt"]) == layout.HEADER_AT
    assert int(constants["LinesAt"]) == layout.LINES_AT
    assert int(constants["Chunk"]) == layout.CHUNK
    assert int(constants["Group"]) == layout.GROUP
    assert int(constants["NormWords"]) == layout.MAX_NORM_WORDS
    for structure in (build.Launch, build.Rowwise):
        body = re.search(rf"struct {structure.__name__} \{{(.*?)\n\}};", source, re.DOTALL)
        assert body
        fields = re.findall(r"(\w+);", re.sub(r"//.*", "", body[1]))
        assert fields == [name for name, *_ in structure._fields_]
    assert ctypes.sizeof(build.Launch) == 8 * 9 + 4 * 13 + 4
    assert ctypes.sizeof(build.Rowwise) == 8 * 3 + 4 * 9 + 4
    items = re.search(r"item;\s+// (.*)", source)
    assert items and items[1] == ", ".join(f"{index} {name}" for index, name in enumerate(layout.DTYPES[:3]))
    assert "kQuantised = 1, kNorm = 2 " in source and (hop.QUANTISED, hop.NORM) == (1, 2)
    codes = re.search(r"enum Code : uint32_t \{(.*?)\};", source)
    assert codes
    found = {name.upper(): int(value) for name, value in re.findall(r"k(\w+) = (\d)", codes[1])}
    assert found == {code.name: code.value for code in hop.HopCode if code}


def test_the_compiler_is_looked_for_and_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with pytest.raises(build.BuildError, match=r"9\.0 or later, found 8\.0"):
        build.command((8, 0), build.SOURCE)
    monkeypatch.setenv(build.NVCC_VARIABLE, "/bin/true")
    assert build.command((9, 0), build.SOURCE)[0] == "/bin/true"
    monkeypatch.delenv(build.NVCC_VARIABLE)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match="found no nvcc"):
        build.nvcc()


def test_importing_the_package_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, afdpatch.kernels.layout, afdpatch.kernels.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
