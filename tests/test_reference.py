"""The reference codec alone: every bit comes back, whatever the weights are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from reference_cases import CONTENTS, LAYOUTS, assert_same, content

from unweight_ext import reference

SHAPES = [(1, 1), (1, 7), (3, 1), (65, 129), (64, 128), (130, 300)]
FALL_BACKS = {
    "raw": {"raw"},
    "huffman": {"huffman", "raw"},
    "nibble": {"nibble", "huffman", "raw"},
    "archive": {"archive", "raw"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONTENTS)
def test_round_trip(layout, shape, name):
    bits = content(name, shape)
    packed = reference.pack(bits, layout)
    header = reference.parse_header(packed)
    assert_same(reference.unpack(packed), bits)
    assert_same(reference.unpack(packed.reshape(-1)), bits)
    assert header.layout in FALL_BACKS[layout]
    assert (header.n, header.k, header.shape) == (*shape, shape)
    assert packed.dtype == np.uint8 and packed.shape == (shape[0], -(-header.used_bytes // shape[0]))
    assert packed.size <= reference.pack(bits, "raw").size


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    shape=st.tuples(st.integers(1, 140), st.integers(1, 270)),
    name=st.sampled_from(list(CONTENTS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_any_shape(layout, shape, name, seed):
    bits = content(name, shape, seed)
    assert_same(reference.unpack(reference.pack(bits, layout)), bits)


@settings(max_examples=100, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    bits=arrays(np.uint16, st.tuples(st.integers(1, 20), st.integers(1, 40)), elements=st.integers(0, 65535)),
)
def test_round_trip_any_bits(layout, bits):
    assert_same(reference.unpack(reference.pack(bits, layout)), bits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 64, 128), (2, 1, 1), (3, 65, 129), (4, 3, 7), (2, 48, 200)])
@pytest.mark.parametrize("name", ["trained", "zero rows", "any bits", "patched"])
def test_stacked(layout, shape, name):
    bits = content(name, shape)
    packed = reference.pack(bits, layout)
    assert packed.shape[:2] == shape[:2] and packed[0].size % 128 == 0
    assert_same(reference.unpack(packed), bits)
    headers = [reference.parse_header(matrix) for matrix in packed]
    for matrix, expected in zip(packed, bits, strict=True):
        assert_same(reference.unpack(matrix), expected)
    assert len({(h.layout, h.base, h.code_id, h.n, h.k) for h in headers}) == 1
    # The smallest row that holds the longest matrix.
    longest = max(h.used_bytes for h in headers)
    smaller = [r for r in range(1, packed.shape[2]) if r * shape[1] % 128 == 0 and r * shape[1] >= longest]
    assert not smaller


def test_stacked_counts_over_all_matrices():
    bits = content("trained", (5, 64, 128))
    few = bits[0] = bits[0] & 0x807F | (200 << 7)  # alone, its base would be near 200
    alone = reference.parse_header(reference.pack(few, "nibble"))
    assert alone.layout == "nibble" and alone.base > 180
    assert {reference.parse_header(p).layout for p in reference.pack(bits, "nibble")} == {"huffman"}
    codes = [reference.parse_header(p).code for p in reference.pack(bits, "huffman")]
    assert all(np.array_equal(code.pairs, codes[0].pairs) for code in codes)
    assert 200 | 200 << 8 in codes[1].pairs


def test_original_shape():
    bits = content("trained", (6, 5 * 3 * 3))
    packed = reference.pack(bits, "archive", (6, 5, 3, 3))
    assert reference.parse_header(packed).shape == (6, 5, 3, 3)
    assert_same(reference.unpack(packed), bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_after_the_end_may_be_more_zeros(layout):
    bits = content("trained", (65, 129))
    packed = reference.pack(bits, layout)
    longer = np.zeros((65, packed.shape[1] + 10), np.uint8)
    longer.reshape(-1)[: packed.size] = packed.reshape(-1)
    assert_same(reference.unpack(longer), bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_misaligned_and_strided_input(layout):
    bits = content("trained", (130, 300))
    packed = reference.pack(bits[::-1, ::-1], layout)
    shifted = np.zeros(packed.size + 1, np.uint8)[1:]
    shifted[:] = packed.reshape(-1)
    assert_same(reference.unpack(shifted), bits[::-1, ::-1])


def test_all_weights_of_bf16():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    for layout in LAYOUTS:
        assert_same(reference.unpack(reference.pack(bits, layout)), bits)


def test_wrong_arguments():
    bits = content("trained", (4, 6))
    for bad in (bits.astype(np.int32), bits[0], bits[:0], bits[None, None], np.zeros((2, 0), np.uint16)):
        with pytest.raises(ValueError, match=r"^weight_bits: expected uint16 \[N, K\]"):
            reference.pack(bad, "raw")
    with pytest.raises(ValueError, match=r"^layout: expected one of raw, huffman, nibble, archive, got 'zip'"):
        reference.pack(bits, "zip")
    for shape in [(4, 5), (24,), (6, 4), (4, 6, 1, 1, 1, 1, 1, 1, 1)]:
        with pytest.raises(ValueError, match=r"^shape: expected 2 to 8 dimensions"):
            reference.pack(bits, "raw", shape)
    packed = reference.pack(bits, "archive")
    for bad in (packed.view(np.int8), packed[:0], packed[None, None]):
        with pytest.raises(ValueError, match=r"^packed: expected uint8"):
            reference.unpack(bad)
    with pytest.raises(ValueError, match="rows: expected 4, got 2"):
        reference.unpack(packed.reshape(2, -1))
    with pytest.raises(ValueError, match="one shape"):
        reference.unpack(np.concatenate([reference.pack(bits[None, :, :k], "raw") for k in (6, 5)]))
    with pytest.raises(ValueError, match="multiple of 128"):
        reference.unpack(packed[None])
