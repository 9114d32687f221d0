"""Hops over each transport between real processes: what arrives, and what is refused before it is sent."""

import contextlib
import threading

import pytest
import torch

from afdpatch.runtime.connectors.base import FfnError, InvalidHop

from .helpers import FAILING_LAYER, HIDDEN, connected, ffn_process, until


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_hop_gives_what_the_ffn_computes(address, page, dtype):
    with (
        ffn_process(address, page, dtype=dtype),
        connected(address, greeting={"dtype": dtype}) as attention,
    ):
        for rows in (1, 3, 32):
            for micro_batch in (0, 1):
                hidden = torch.randn(rows, HIDDEN).to(getattr(torch, dtype))
                assert torch.equal(attention.hop(hidden, 0, micro_batch), hidden * 2)


def test_a_result_stays_when_the_next_hop_comes(address, ffn):
    with connected(address) as attention:
        first = attention.hop(torch.ones(2, HIDDEN), 0)
        attention.hop(torch.zeros(2, HIDDEN), 0)
        assert torch.equal(first, torch.full((2, HIDDEN), 2.0))


def test_a_result_goes_where_the_caller_wants_it(address, ffn):
    with connected(address) as attention:
        batch = torch.zeros(5, HIDDEN)
        hidden = torch.randn(2, HIDDEN)
        given = attention.hop(hidden, 0, out=batch[1:3])
        assert given.data_ptr() == batch[1].data_ptr()
        expected = torch.zeros(5, HIDDEN)
        expected[1:3] = hidden * 2
        assert torch.equal(batch, expected)


@pytest.mark.parametrize(
    ("out", "found"),
    [
        (torch.zeros(3, HIDDEN), r"\[3, 64\] torch.float32 on cpu"),
        (torch.zeros(2, HIDDEN, dtype=torch.float64), r"torch.float64"),
        (torch.zeros(2, HIDDEN, device="meta"), "on meta"),
        (torch.zeros(HIDDEN, 2).t(), r"strides \(1, 2\); expected \[2, 64\] torch.float32 on cpu, contiguous"),
    ],
)
def test_a_place_that_the_result_does_not_fit_is_refused_before_anything_is_sent(address, ffn, page, out, found):
    with connected(address) as attention:
        with pytest.raises(InvalidHop, match=found):
            attention.hop(torch.ones(2, HIDDEN), 0, out=out)
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
        until(lambda: page.snapshot().hops == 1, "only the good hop arrived")


def test_strides_dont_matter(address, ffn):
    with connected(address) as attention:
        hidden = torch.randn(HIDDEN, 5).t()
        assert not hidden.is_contiguous()
        assert torch.equal(attention.hop(hidden, 0), hidden * 2)


def test_hops_work_in_and_out_of_inference_mode(address, ffn):
    with contextlib.ExitStack() as stack:
        with torch.inference_mode():
            attention = stack.enter_context(connected(address))
            attention.hop(torch.ones(1, HIDDEN), 0)
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))


def test_no_rows_no_hop(address, ffn, page):
    with connected(address) as attention:
        assert attention.hop(torch.empty(0, HIDDEN), 0).shape == (0, HIDDEN)
        attention.hop(torch.ones(1, HIDDEN), 0)
        until(lambda: page.snapshot().hops == 1, "one hop counted")


@pytest.mark.parametrize(
    ("hidden", "layer", "micro_batch", "expected"),
    [
        (torch.ones(33, HIDDEN), 0, 0, r"\[33, 64\], expected \[0..32, 64\]"),
        (torch.ones(1, HIDDEN + 1), 0, 0, r"\[1, 65\], expected"),
        (torch.ones(HIDDEN), 0, 0, r"\[64\], expected"),
        (torch.ones(1, HIDDEN, dtype=torch.bfloat16), 0, 0, "bfloat16 on cpu, expected torch.float32"),
        (torch.ones(1, HIDDEN, device="meta"), 0, 0, "on meta, expected torch.float32 on cpu"),
        (torch.ones(1, HIDDEN), 4, 0, "expected a layer of the greeting"),
        (torch.ones(1, HIDDEN), 0, 2, "micro-batch 2, expected 0..1"),
    ],
)
def test_a_wrong_hop_is_refused_before_anything_is_sent(address, ffn, page, hidden, layer, micro_batch, expected):
    with connected(address) as attention:
        with pytest.raises(InvalidHop, match=expected):
            attention.hop(hidden, layer, micro_batch)
        attention.hop(torch.ones(1, HIDDEN), 0)
        until(lambda: page.snapshot().hops == 1, "only the good hop arrived")
        assert page.snapshot().errors == 0


def test_a_failed_computation_is_an_error_with_its_text_and_the_next_hop_works(address, ffn, page):
    with connected(address) as attention:
        with pytest.raises(FfnError, match=r"layer 1, sequence 1.*no such expert"):
            attention.hop(torch.ones(1, HIDDEN), FAILING_LAYER)
        assert torch.equal(attention.hop(torch.ones(1, HIDDEN), 0), torch.full((1, HIDDEN), 2.0))
    assert page.snapshot().errors == 1 and "no such expert" in page.snapshot().last_error


def test_a_result_of_another_shape_is_an_error(address, ffn):
    with connected(address) as attention, pytest.raises(FfnError, match=r"\[2, 1\], expected .*\[2, 64\]"):
        attention.hop(torch.ones(2, HIDDEN), 3)


def test_threads_take_turns(address, ffn):
    with connected(address) as attention:
        wrong = []

        def work(value):
            for _ in range(200):
                if not torch.equal(
                    attention.hop(torch.full((2, HIDDEN), value), 0), torch.full((2, HIDDEN), 2 * value)
                ):
                    wrong.append(value)

        threads = [threading.Thread(target=work, args=(float(value),)) for value in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_hop_of_many_rows_goes_through_in_parts(address, page):
    wide = {"hidden_size": 4096, "max_rows": 4096}
    with ffn_process(address, page, **wide), connected(address, greeting=wide) as attention:
        for rows in (4096, 1, 4000):
            hidden = torch.randn(rows, 4096)  # 64 MiB: far more than a socket's buffers take at once
            assert torch.equal(attention.hop(hidden, 0), hidden * 2)
