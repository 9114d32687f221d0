"""The reference's quantised messages and its norm, on the CPU. The plain messages are in test_layout.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afdpatch.kernels import reference
from afdpatch.kernels.layout import Geometry

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""How far rounding to the dtype moves a number, as a part of it."""
HIDDEN = st.integers(1, 90).map(lambda n: 16 * n)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def scales(wire: torch.Tensor, hidden: int) -> torch.Tensor:
    groups = -(-hidden // 128)
    return wire[:, hidden : hidden + 4 * groups].contiguous().view(torch.float32)


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9), HIDDEN, st.sampled_from(DTYPES), st.integers(-30, 12))
def test_what_comes_out_is_within_half_a_step_of_eight_bits(
    seed: int, count: int, hidden: int, dtype: torch.dtype, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, hidden, generator=generator)
    rows *= torch.exp2(torch.randint(-6, 3, rows.shape, generator=generator)) * 2.0**exponent
    rows[rows.abs() < torch.finfo(dtype).tiny] = 0
    rows = rows.to(dtype)
    wire = reference.quantise(rows)
    assert wire.shape == (count, Geometry(1, hidden, wire="float8_e4m3fn").wire_row_bytes)
    found = reference.dequantise(wire, hidden, dtype)
    for row, got, scale in zip(rows.double(), found.double(), scales(wire, hidden), strict=True):
        for part, out, one in zip(row.split(128), got.split(128), scale.tolist(), strict=True):
            largest = part.abs().max().item()
            assert one == (torch.tensor(largest).float() / 448).item() or (largest == 0 and one == 1)
            # Half a step: 2 ** -4 of a number, or of the smallest step (2 ** -9 scales) below 2 ** -6 scales.
            bound = (part.abs() * 2.0**-4).clamp(min=one * 2.0**-10) * (1 + 2.0**-20)
            bound += part.abs() * STEP[dtype] * 1.07 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert bool(((out - part).abs() <= bound).all())
            assert math.isclose(out.abs().max().item(), largest, rel_tol=2 * STEP[dtype], abs_tol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_exact_in_eight_bits_comes_out_as_it_was(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].repeat(2)[: 3 * 128 + 112].view(1, -1)
    numbers[0, ::100] = -448
    wire = reference.quantise(numbers.to(dtype))
    assert scales(wire, numbers.shape[1]).tolist() == [[1.0] * 4]
    assert torch.equal(reference.dequantise(wire, numbers.shape[1], dtype).float(), numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_to_the_nearest_and_ties_go_to_even(dtype: torch.dtype) -> None:
    #        a tie down, a tie up, just beside them; below half the smallest step, a tie to zero, to the smallest
    given = [448, 17, 19, 17.125, 18.875, -17, 2.0**-11, 2.0**-10, 2.0**-10 * 1.0625, 3 * 2.0**-10]
    expected = [448, 16, 20, 18, 18, -16, 0, 0, 2.0**-9, 2 * 2.0**-9]
    rows = torch.zeros(1, 16)
    rows[0, : len(given)] = torch.tensor(given)
    wire = reference.quantise(rows.to(dtype))
    assert reference.dequantise(wire, 16, dtype)[0, : len(given)].tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nans_infinities_zeros_and_the_smallest_numbers(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.zeros(1, 5 * 128 + 16, dtype=dtype)
    rows[0, :3] = torch.tensor([nan, 7.0, -nan])
    rows[0, 128:131] = torch.tensor([inf, 1.0, nan])
    rows[0, 256:258] = torch.tensor([-0.0, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps], dtype=dtype)
    rows[0, 384:386] = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
    rows[0, 512:640] = nan
    wire = reference.quantise(rows)
    found = reference.dequantise(wire, rows.shape[1], dtype)[0]
    scale = scales(wire, rows.shape[1])[0]
    assert scale[[0, 1, 4, 5]].tolist() == [7 / 448, inf, 1.0, 1.0]
    assert wire[0, [0, 2]].tolist() == [0x7F, 0x7F] and wire[0, 128:131].tolist() == [0x7F, 0, 0x7F]
    assert found[1] == 7 and bool(found[[0, 2]].isnan().all()) and not found[3:128].count_nonzero()
    assert bool(found[128:256].isnan().all())  # all of a group that has an infinity
    if dtype != torch.float16:  # bfloat16's and float32's smallest have no scale: they come out as zeros
        assert scale[2] == 1 and not found[256:384].count_nonzero()
    assert math.copysign(1, found[256].item()) == -1
    assert found[384] == -found[385] and found[384] >= torch.finfo(dtype).max * 0.99
    assert bool(found[512:640].isnan().all()) and not found[640:].count_nonzero()
    bits = found.view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert set(bits[found.isnan()].tolist()) == {0x7FFFFFFF if dtype == torch.float32 else 0x7FFF}


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 40),
    HIDDEN,
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(0, 40_000),
    st.integers(1, 128),
    st.integers(1, (1 << 32) - 1),
    st.booleans(),
)
def test_the_first_senders_messages_are_quantised_and_the_others_are_not(
    count: int, hidden: int, dtype: str, limit: int, blocks: int, number: int, initiator: bool
) -> None:
    geometry = Geometry(
        count, hidden, dtype, packed_limit=limit, packed_blocks=blocks, wire="float8_e4m3fn", wire_blocks=blocks
    )
    rows = torch.randn(count, hidden).to(getattr(torch, dtype))
    slot = torch.zeros(geometry.slot_bytes, dtype=torch.uint8)
    reference.write(slot, geometry, rows, number, 3, 1, initiator=initiator)
    expected = rows
    if initiator:
        expected = reference.dequantise(reference.quantise(rows), hidden, rows.dtype)
        assert not slot[geometry.payload_at : geometry.wire_at].count_nonzero()
    assert same(reference.read(slot, geometry, count, number, 3, 1, initiator=initiator), expected)
    with pytest.raises(reference.NotThere):
        reference.read(slot, geometry, count, number, 3, 1, initiator=initiator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_that_of_vllms_ir(dtype: torch.dtype) -> None:
    ops = pytest.importorskip("vllm.ir.ops.layernorm")
    hidden, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 336), (5, 336), (336,)))
    rows, total = reference.norm(hidden, residual, weight, 1e-6)
    expected = ops.fused_add_rms_norm(hidden.clone(), residual.clone(), weight, 1e-6)
    assert same(rows, expected[0]) and same(total, expected[1])


def test_the_norm_by_hand() -> None:
    hidden, residual = torch.tensor([[2.0, -1.0, 0.0, 3.0]]), torch.tensor([[1.0, -3.0, 0.0, 2.0]])
    rows, total = reference.norm(hidden, residual, torch.tensor([1.0, 2.0, 3.0, 0.5]), 0.0)
    assert total.tolist() == [[3, -4, 0, 5]]
    root = math.sqrt((9 + 16 + 25) / 4)
    assert rows.tolist()[0] == pytest.approx([3 / root, -8 / root, 0, 2.5 / root])
