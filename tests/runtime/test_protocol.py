import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afdpatch.runtime.protocol import (
    HEADER,
    HEADER_BYTES,
    MAX_ERROR_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    Greeting,
    Header,
    HopLimits,
    Kind,
    Layout,
    Mismatch,
    ProtocolError,
    Refusal,
    advice,
    clip,
    compare,
    decode_answer,
    error_message,
    error_text,
)

from .helpers import HIDDEN, greeting

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
headers = st.builds(Header, st.sampled_from([*map(int, Kind)]), u8, u64, u64, u32, u16, u32, u32, u64, u64)
GOOD = Header(Kind.HOP, 3, 9, 4, 1, 1, 5, HIDDEN, 2 * 8192, 5 * HIDDEN * 4)


def test_a_header_is_64_bytes_and_its_layout_stays():
    assert HEADER_BYTES == HEADER.size == 64
    assert GOOD.pack() == bytes.fromhex(
        "414644680300010309000000000000000400000000000000010000000100000005000000400000000040000000000000"
        "00050000000000000000000000000000"
    )


@given(headers)
def test_a_header_survives_the_way(header):
    assert Header.unpack(header.pack()) == header


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error_or_a_header(data):
    for candidate in (data, b"AFDh" + data, b"AFDh\x03\x00" + data):
        try:
            HopLimits(greeting("attention")).check(Header.unpack(candidate))
        except ProtocolError as error:
            assert error.field and error.allowed


@given(headers)
def test_a_checked_header_stays_inside_the_memfd(header):
    ours = greeting("attention")
    try:
        HopLimits(ours).check(header)
    except ProtocolError:
        return
    layout = Layout.of(ours)
    assert header.offset + header.nbytes <= layout.total_bytes
    assert header.nbytes == header.rows * layout.row_bytes


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kind", {"kind": Kind.REPLY}),
        ("dtype", {"dtype": 1}),
        ("hidden", {"hidden": HIDDEN + 1}),
        ("rows", {"rows": 0}),
        ("rows", {"rows": 33}),
        ("layer", {"layer": 4}),
        ("micro_batch", {"micro_batch": 2}),
        ("payload offset", {"offset": 0}),
        ("payload bytes", {"nbytes": 4}),
    ],
)
def test_a_field_out_of_its_limits_is_named(field, change):
    HopLimits(greeting("attention")).check(GOOD)
    with pytest.raises(ProtocolError) as caught:
        HopLimits(greeting("attention")).check(GOOD._replace(**change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("header length", GOOD.pack()[:63]),
        ("magic", b"XFDh" + GOOD.pack()[4:]),
        ("version", b"AFDh\x02\x00" + GOOD.pack()[6:]),
        ("kind", b"AFDh\x03\x00\x00" + GOOD.pack()[7:]),
        ("kind", b"AFDh\x03\x00\x08" + GOOD.pack()[7:]),
    ],
)
def test_a_broken_header_is_named(field, message):
    with pytest.raises(ProtocolError) as caught:
        Header.unpack(message)
    assert caught.value.field == field


def test_regions_lie_apart():
    layout = Layout.of(greeting("attention", max_rows=17, micro_batches=3))
    starts = sorted([layout.a2f_offset(i) for i in range(3)] + [layout.f2a_offset(i) for i in range(3)])
    ends = [start + layout.max_rows * layout.row_bytes for start in starts]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], layout.total_bytes], strict=True))


def test_an_error_text_is_cut_to_its_limit_and_stays_text():
    message = error_message(GOOD, "é" * 5000)
    head = Header.unpack(message)
    assert (head.kind, head.sequence, head.nbytes) == (Kind.ERROR, 9, len(message) - HEADER_BYTES)
    assert len(message) <= HEADER_BYTES + MAX_ERROR_BYTES
    assert error_text(message) == "é" * 2048


@given(st.text(), st.integers(0, 64))
def test_clipped_text_is_a_prefix(text, limit):
    data = clip(text, limit)
    assert len(data) <= limit
    assert text.encode("utf-8", "replace").decode().startswith(data.decode())


greetings = st.builds(
    Greeting,
    role=st.sampled_from(["attention", "ffn"]),
    rank=st.just(0),
    manifest_digest=st.text(max_size=70),
    vllm_version=st.text(max_size=20),
    model=st.text(max_size=200),
    config_digest=st.text(max_size=70),
    checkpoint=st.text(max_size=70),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    hidden_size=st.integers(1, 1 << 17),
    layers=st.sets(st.integers(0, 65535), min_size=1, max_size=100).map(lambda s: tuple(sorted(s))),
    max_rows=st.integers(1, 1 << 20),
    micro_batches=st.integers(1, 8),
    num_attention_ranks=st.integers(1, 4096),
    num_ffn_ranks=st.integers(1, 4096),
    state=st.sampled_from(["loading", "serving"]),
    tensor_parallel=st.integers(1, 4096),
    graph_mode=st.text(max_size=20),
    a2f_dtype=st.sampled_from(["auto", "fp8_e4m3"]),
    instance=st.text("0123456789abcdef", min_size=16, max_size=64),
)


@given(greetings)
def test_a_greeting_survives_the_way(ours):
    assert Greeting.decode(ours.encode()) == ours == decode_answer(ours.encode())


@given(st.binary(max_size=300) | st.text().map(lambda t: json.dumps(t).encode()))
def test_random_bytes_are_no_greeting(data):
    for read in (Greeting.decode, decode_answer):
        with pytest.raises(ProtocolError):
            read(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(asdict(greeting("ffn")))), json_values)
def test_any_value_in_any_field_is_a_greeting_or_a_protocol_error(field, value):
    data = json.loads(greeting("ffn").encode())
    data[field] = value
    message = json.dumps(data).encode()
    try:
        assert json.loads(Greeting.decode(message).encode()) == data
    except ProtocolError as error:
        assert error.field


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b"{" * 60_000, b"1" * 10_000, b" " * (MAX_GREETING_BYTES + 1), b"\xff"]
)
def test_hostile_json_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        Greeting.decode(data)


def test_another_protocol_version_is_named_whatever_else_it_has():
    with pytest.raises(ProtocolError) as caught:
        Greeting.decode(json.dumps({"protocol": PROTOCOL_VERSION + 1, "new": 1}).encode())
    assert caught.value.field == "protocol"


def test_of_too_many_rows_the_option_is_named():
    more = compare(greeting("attention", max_rows=64), greeting("ffn", max_rows=16))
    assert advice(more).endswith("give the FFN server at least the attention server's --max-num-batched-tokens")
    other = compare(greeting("attention"), greeting("ffn", dtype="bfloat16"))
    assert advice(other) == "start both alike, with one afdpatch"


def test_servers_that_fit_have_no_mismatch():
    assert compare(greeting("attention"), greeting("ffn", state="serving")) == []
    assert compare(greeting("ffn", max_rows=64, micro_batches=4), greeting("attention", rank=1)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("manifest_digest", "cc"),
        ("vllm_version", "0.31.0"),
        ("model", "other"),
        ("config_digest", "cc"),
        ("checkpoint", "other weights"),
        ("dtype", "bfloat16"),
        ("hidden_size", 128),
        ("layers", (0, 1)),
        ("num_attention_ranks", 3),
        ("num_ffn_ranks", 2),
        ("tensor_parallel", 2),
        ("graph_mode", "full"),
        ("a2f_dtype", "fp8_e4m3"),
        ("max_rows", 16),
        ("micro_batches", 1),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(field, value):
    ours = greeting("attention")
    theirs = greeting("ffn", **{field: value})
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    (mismatch,) = compare(ours, theirs)
    assert (mismatch.field, mismatch.theirs) == (field, shown)
    (mirrored,) = compare(theirs, ours)
    assert (mirrored.field, mirrored.ours, mirrored.theirs) == (field, mismatch.theirs, mismatch.ours)


def test_two_of_one_role_dont_fit():
    assert [mismatch.field for mismatch in compare(greeting("ffn"), greeting("ffn"))] == ["role"]


def test_a_refusal_survives_the_way_and_fits_a_message():
    refusal = Refusal("dtype", (Mismatch("dtype", "float32", "bfloat16"),), retry=True)
    assert decode_answer(refusal.encode()) == refusal
    long = Refusal("x" * 100_000, (Mismatch("layers", "1," * 9999, "2"),) * 99)
    assert len(long.encode()) <= MAX_GREETING_BYTES


def test_a_refusal_of_the_first_protocol_is_read():
    assert decode_answer(b'{"refused": "no", "mismatches": []}') == Refusal("no")


def test_a_process_names_itself_alike_each_time():
    assert greeting("ffn").instance == greeting("attention").instance


def test_a_rank_outside_of_its_role_is_refused():
    with pytest.raises(ProtocolError, match="rank"):
        replace(greeting("attention"), rank=2)
