"""Damaged and hostile bytes: the reference raises ValueError, and nothing else."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import LAYOUTS, assert_same, content, seal, stages_of

from unweight_ext import reference

PACKED = {
    "raw": reference.pack(content("any bits", (70, 129)), "raw"),
    "huffman": reference.pack(content("half noise", (70, 301)), "huffman"),
    "nibble": reference.pack(content("patched", (70, 150), 2), "nibble"),
    "archive": reference.pack(content("some noise", (301, 401)), "archive"),
}


def test_the_damaged_ones_are_of_all_layouts():
    for layout, packed in PACKED.items():
        header = reference.parse_header(packed)
        assert header.layout == layout and (header.patches > 0) == (layout != "raw")
        assert packed.size > header.used_bytes
        sealed = packed.copy()
        seal(sealed)
        assert np.array_equal(sealed, packed)


@settings(max_examples=400, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), place=st.floats(0, 1, exclude_max=True), in_header=st.booleans())
def test_a_flipped_bit_is_found(layout, place, in_header):
    packed = PACKED[layout].copy().reshape(-1)
    size = reference.parse_header(packed).data_offset if in_header else packed.size
    bit = int(place * 8 * size)
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"^packed: .*: expected .*, got "):
        reference.unpack(packed)


@settings(max_examples=200, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), rows=st.integers(1, 70), place=st.floats(0, 1, exclude_max=True))
def test_truncated(layout, rows, place):
    packed = PACKED[layout]
    used = reference.parse_header(packed).used_bytes
    for short in (packed[:rows], packed[:, : int(place * used / len(packed))], packed.reshape(-1)[: int(place * used)]):
        if short.size < used:
            with pytest.raises(ValueError, match=r"^packed: "):
                reference.unpack(short)


FIELDS = {  # offset, format
    "version": (8, "<H"), "layout": (10, "<B"), "dtype": (11, "<B"), "longest": (12, "<B"), "base": (13, "<B"),
    "rank": (14, "<B"), "segment": (15, "<B"), "N": (24, "<Q"), "K": (32, "<Q"), "used": (40, "<Q"),
    "index": (48, "<Q"), "checksums": (56, "<Q"), "data": (64, "<Q"), "code_id": (72, "<Q"), "patches": (80, "<Q"),
    "zero": (88, "<Q"), "shape": (96, "<I"), "shape[1]": (100, "<I"), "shape[7]": (124, "<I"),
}  # fmt: skip


def test_a_header_that_promises_more_index_than_there_are_bytes():
    packed = reference.pack(content("any bits", (3, 130)), "raw")
    packed.reshape(-1)[24:32].view("<u8")[0] = 525889  # N; an index cut off within a word
    seal(packed)
    with pytest.raises(ValueError):
        reference.unpack(packed)


@settings(max_examples=400, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), field=st.sampled_from(list(FIELDS)), data=st.data())
def test_hostile_header(layout, field, data):
    """With right checksums: most fields have one right value."""
    packed = PACKED[layout].copy().reshape(-1)
    offset, form = FIELDS[field]
    size = struct.calcsize(form)
    before = int.from_bytes(packed[offset : offset + size].tobytes(), "little")
    near = st.integers(max(0, before - 64), before + 64)
    value = data.draw(near | st.integers(0, 256**size - 1) | st.integers(0, 64).map(lambda b: 2**b))
    value %= 256**size
    packed[offset : offset + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    seal(packed)
    # These rows are one segment of any length. Another base scales the weights, if it leaves them in range.
    if field == "base" and layout == "nibble" and 1 <= value <= 239:
        try:
            assert (value == before) == np.array_equal(reference.unpack(packed), reference.unpack(PACKED[layout]))
        except ValueError as error:
            assert "scaled exponents" in str(error)
        return
    if value == before or (field == "segment" and 8 <= value <= 32 and layout != "archive"):
        assert_same(reference.unpack(packed), reference.unpack(PACKED[layout]))
        return
    with pytest.raises(ValueError, match=r"^packed: "):
        reference.unpack(packed)


def put(flat: np.ndarray, place: int, form: str, *values: int) -> None:
    data = struct.pack(form, *values)
    flat[place : place + len(data)] = np.frombuffer(data, np.uint8)


@pytest.mark.parametrize(
    "layout, change, message",
    [
        ("raw", lambda p, h: put(p, 0, "<B", 0), "magic"),
        ("raw", lambda p, h: (put(p, 32, "<Q", 2**33), put(p, 14, "<B", 3), put(p, 100, "<2I", 2**16, 2**17)), "N, K"),
        ("raw", lambda p, h: put(p, h.index_offset, "<I", 1), "index: expected 0 first"),
        ("raw", lambda p, h: put(p, h.index_offset + 4, "<I", 2050), "index: expected 0 first, then rising"),
        ("huffman", lambda p, h: put(p, 160 + 2 * len(h.code.pairs), "<B", 1), "gap after the code table"),
        ("raw", lambda p, h: put(p, h.checksums_offset - 1, "<B", 1), "gap after the index"),
        ("raw", lambda p, h: put(p, h.data_offset - 1, "<B", 1), "gap after the checksums"),
        ("archive", lambda p, h: put(p, h.data_offset + 8, "<B", 1), "chunk 0: header"),
    ],
)
def test_broken_header(layout, change, message):
    packed = PACKED[layout].copy().reshape(-1)
    change(packed, reference.parse_header(packed))
    seal(packed)
    with pytest.raises(ValueError, match=message):
        reference.unpack(packed)


@pytest.mark.parametrize("byte", range(16, 24))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_header_checksum_is_checked(layout, byte):
    packed = PACKED[layout].copy().reshape(-1)
    packed[byte] ^= 1
    with pytest.raises(ValueError, match="header checksum"):
        reference.parse_header(packed)


def test_size_is_a_multiple_of_the_rows():
    with pytest.raises(ValueError, match="a multiple of N = 70"):
        reference.unpack(np.append(PACKED["raw"], np.uint8(0)))


@settings(max_examples=400, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**32 - 1), where=st.sampled_from(["head", "data", "all"]))
def test_hostile_bytes(layout, seed, where):
    """With right checksums: other weights or ValueError, nothing else."""
    rng = np.random.default_rng(seed)
    packed = PACKED[layout].copy().reshape(-1)
    start = reference.parse_header(packed).data_offset
    low, high = {"head": (8, start), "data": (start, packed.size), "all": (8, packed.size)}[where]
    for _ in range(rng.integers(1, 9)):
        place = rng.integers(low, high)
        # Often what the format is made of: the words at the start of units.
        if rng.random() < 0.5 and where == "data":
            place = start + rng.integers(0, 16)
        packed[place] = rng.choice([0, 255, rng.integers(0, 256), packed[place] ^ 1 << rng.integers(0, 8)])
    seal(packed)
    try:
        assert reference.unpack(packed).dtype == np.uint16
    except ValueError as error:
        assert str(error).startswith("packed: ")


def patched(layout: str, bits: np.ndarray, change) -> np.ndarray:
    """Pack, let `change` write into the stages (u32), make the checksums right."""
    packed = reference.pack(bits, layout).reshape(-1)
    assert reference.parse_header(packed).layout == layout
    change([stage.view("<u4") for stage in stages_of(packed)])
    seal(packed)
    return packed


def set_word(place: int, value: int, stage: int = 0, mask: int = 0xFFFFFFFF):
    def change(stages):
        stages[stage][place] = int(stages[stage][place]) & ~mask & 0xFFFFFFFF | value

    return change


@pytest.mark.parametrize(
    "layout, change, message",
    [
        ("raw", set_word(0, 0), "raw stage"),
        ("raw", set_word(4 + 1024 * 3 + 128 * 7 + 4 * 31 + 3, 1, stage=3), "padding"),
        ("nibble", set_word(0, 1 << 14, mask=1 << 14), "0xc000"),
        ("nibble", set_word(1, 1 << 15, mask=1 << 15), "0xc000"),
        ("huffman", set_word(2, 1 << 13, mask=1 << 13), "0xe000"),
        ("huffman", set_word(3, 1 << 15, mask=1 << 15), "0xe000"),
        ("huffman", set_word(0, 1 << 14, mask=1 << 14), "raw stage"),
        ("huffman", set_word(0, 2051, mask=0x1FFF), "sections"),
        ("huffman", set_word(1, 2051, mask=0x1FFF), "sections"),
        ("huffman", set_word(3, 0x1FFF, mask=0x1FFF), "sections"),
        ("nibble", set_word(2, 3075, mask=0x1FFF), "sections"),
        ("nibble", set_word(0, 129 << 24, mask=255 << 24), "at most 128"),
        ("nibble", set_word(0, 1 << 24, mask=255 << 24), "words|patches"),
        ("nibble", set_word(0, 1 << 16, mask=255 << 16), "k-steps"),
        ("nibble", set_word(4 + 2047, 1, stage=3), "padding"),
        ("huffman", set_word(4 + 2047, 1, stage=3), "padding"),
    ],
)
def test_broken_stages(layout, change, message):
    bits = content("trained", (70, 150))
    bits[0, 0] = 0x3D80  # no patch before stage 0's words
    with pytest.raises(ValueError, match=message):
        reference.unpack(patched(layout, bits, change))


PATCH = 12304 // 4  # where the sections of a nibble stage begin


@pytest.mark.parametrize(
    "change, message",
    [
        (set_word(PATCH, 0, mask=1 << 31), "k-steps"),
        (set_word(PATCH + 1, 1 << 31, mask=1 << 31), "k-steps"),
        (set_word(PATCH, 5, mask=127), "rising"),
        (set_word(PATCH, 1 << 15, mask=0xFF << 15), "bits 15 to 22"),
        (set_word(PATCH, 191 << 7, mask=0xFF << 7), "scaled"),
        (set_word(PATCH, 254 << 23, mask=0xFF << 23), "scaled"),
        (set_word(4, 1), "subnormal"),
        (set_word(-1, 1), "end of the stage"),
    ],
)
def test_broken_patches(change, message):
    bits = np.full((64, 128), 0x3F80, np.uint16)
    bits[0, 0] = bits[0, 2] = 0  # warp 0, k-step 0: registers 0 of lanes 0 and 1
    with pytest.raises(ValueError, match=message):
        reference.unpack(patched("nibble", bits, change))


@pytest.mark.parametrize(
    "change, message",
    [
        (set_word(PATCH, 0x10000), "zero rows"),
        (set_word(PATCH + 2, 0x12), "zero rows"),  # row 20 of 0 to 19
        (set_word(PATCH, 3), "none in zero rows"),  # row 1 has a patch
        (set_word(PATCH, 5), "signs and mantissas"),  # row 2 isn't zero
    ],
)
def test_broken_zero_rows(change, message):
    bits = np.full((20, 128), 0x3F81, np.uint16)
    bits[[0, 17]] = 0
    bits[1, 0] = 0x7F80
    packed = reference.pack(bits, "nibble")
    words = stages_of(packed)[0].view("<u4")
    assert words[PATCH] == 1 and words[PATCH + 2] == 2  # warp 0: mask, a patch; warp 1: mask
    with pytest.raises(ValueError, match=message):
        reference.unpack(patched("nibble", bits, change))
