"""Segments, padding, patches, zero rows and fall-backs of the reference (docs/FORMAT.md sections 5 to 9)."""

import numpy as np
import pytest
from reference_cases import LAYOUTS, assert_same, content, stages_of

from unweight_ext import reference, reference_tiles


@pytest.mark.parametrize(
    "shape, stages",
    [
        ((1, 1), 16),
        ((64, 63 * 1024), 16),
        ((64, 63 * 1024 + 1), 8),
        ((63 * 64, 1024), 16),
        ((63 * 64, 1025), 8),
        ((4096, 4096), 16),
        ((4096, 14336), 28),
        ((6144, 4096), 8),
        ((14336, 4096), 8),
        ((10240, 5120), 10),
        ((25600, 5120), 9),
        ((8192, 8192), 32),
        ((14336, 8192), 16),
        ((128256, 4096), 8),
    ],
)
def test_segment_stages(shape, stages):
    assert reference_tiles.segment_stages(*shape) == stages


@pytest.mark.parametrize("stages", [8, 16, 32])
@pytest.mark.parametrize("name", ["trained", "half noise", "patched"])
def test_streams_restart_in_each_segment(monkeypatch, stages, name):
    # The reference is too slow for a matrix that is given long segments; any reader takes any length.
    for module in (reference, reference_tiles):
        monkeypatch.setattr(module, "segment_stages", lambda n, k: stages)
    segment = content(name, (64, 128 * stages))
    bits = np.hstack([segment, segment, segment[:, :200]])
    packed = reference.pack(bits, "huffman")
    assert reference.parse_header(packed).segment_stages == stages
    parts = [stage.tobytes() for stage in stages_of(packed)]
    assert parts[:stages] == parts[stages : 2 * stages]
    assert parts[:1] != parts[1:2]
    assert_same(reference.unpack(packed), bits)


@pytest.mark.parametrize("raw", [[0], [1], [0, 1], [15], [16], [19], [*range(16)], [*range(1, 17)], [*range(16, 20)]])
def test_raw_stages_between_others(raw):
    bits = content("trained", (64, 2560))
    for s in raw:
        bits[:, 128 * s : 128 * s + 128] = content("any bits", (64, 128), s)
    packed = reference.pack(bits, "huffman")
    assert reference.parse_header(packed).layout == "huffman"
    assert [s for s, stage in enumerate(stages_of(packed)) if stage.view("<u4")[0] >> 14 & 1] == raw
    assert_same(reference.unpack(packed), bits)


@pytest.mark.parametrize("patches", [127, 128, 129])
def test_a_warp_has_128_patches_at_most(patches):
    bits = np.full((64 * 80, 128), 0x3F80, np.uint16)
    # Four pairs so rare that they have no code.
    bits[16:32].reshape(-1, 2)[:patches] = 0x4900 + 0x80 * (np.arange(patches)[:, None] % 4)
    nibble, huffman = (reference.pack(bits, layout) for layout in ("nibble", "huffman"))
    header = reference.parse_header(nibble)
    assert (header.layout, header.patches) == (("nibble", patches) if patches <= 128 else ("huffman", 0))
    header = reference.parse_header(huffman)
    assert (header.layout, header.patches) == ("huffman", patches if patches <= 128 else 0)
    raw = [stage.view("<u4")[0] >> 14 & 1 for stage in stages_of(huffman)]
    assert raw == [patches > 128] + [0] * 79


@pytest.mark.parametrize("k", [1, 7, 129, 255])
@pytest.mark.parametrize("exponent", [0, 1, 127, 254, 255])
def test_odd_k_pads_with_a_zero(k, exponent):
    """Whatever the matrix is full of, padding is ±0: `unpack` says so."""
    bits = np.full((3, k), exponent << 7 | 0x15, np.uint16)
    for layout in LAYOUTS:
        assert_same(reference.unpack(reference.pack(bits, layout)), bits)


def test_padding_of_infinities_is_patched():
    bits = np.full((64, 8), 0x7F80, np.uint16)
    bits[0, 0] = 0x3F80
    # 15 of 16 registers are padding. The only pair with a code has 255s, the pair (0, 0) has none: too many patches.
    packed = reference.pack(bits, "huffman")
    assert reference.parse_header(packed).layout == "raw"
    # With 100 columns, the padding of the last k-steps still fits.
    bits = np.full((64, 128 + 124), 0x7F80, np.uint16)
    packed = reference.pack(bits, "huffman")
    assert (reference.parse_header(packed).layout, reference.parse_header(packed).patches) == ("huffman", 64 * 2)
    assert_same(reference.unpack(packed), bits)


def matrix_with(*values: int) -> np.ndarray:
    bits = content("trained", (128, 256)) + np.uint16(20 << 7)  # a base above 112
    bits.reshape(-1)[: len(values)] = values
    return bits


@pytest.mark.parametrize(
    "values, layout",
    [
        ([], "nibble"),
        ([0x0000, 0x8000, 0x7F80, 0xFFC1], "nibble"),
        ([0x0001], "huffman"),  # a subnormal
        ([0x807F], "huffman"),
        ([0x0080], "huffman"),  # e = 1, scaled below 1
        ([0x7F00], "huffman"),  # e = 254, scaled above 190
    ],
)
def test_nibble_falls_back_to_huffman(values, layout):
    bits = matrix_with(*values)
    packed = reference.pack(bits, "nibble")
    assert reference.parse_header(packed).layout == layout
    assert_same(reference.unpack(packed), bits)


@pytest.mark.parametrize("scaled", [0, 1, 190, 191])
def test_range_of_scaled_exponents(scaled):
    base = reference.parse_header(reference.pack(matrix_with(), "nibble")).base
    header = reference.parse_header(reference.pack(matrix_with((scaled + base - 112) << 7), "nibble"))
    assert (header.layout, header.base) == (("nibble", base) if 1 <= scaled <= 190 else ("huffman", 0))


def test_patches_of_nibble_may_take_a_quarter_bit():
    # 256 × 128 weights take 256 patches, here 64 a warp.
    bits = np.full((256, 128), 0x3F80, np.uint16)
    bits[::16, :32:2] = 0x7F80
    header = reference.parse_header(reference.pack(bits, "nibble"))
    assert (header.layout, header.patches) == ("nibble", 256)
    bits[0, 40] = 0x7F80
    assert reference.parse_header(reference.pack(bits, "nibble")).layout == "huffman"


def test_zero_rows_cost_no_patches():
    bits = np.zeros((100, 200), np.uint16)
    header = reference.parse_header(reference.pack(bits, "nibble"))
    assert (header.layout, header.patches, header.base) == ("nibble", 0, 1)
    bits[3, 150] = 0x8000  # the row's second stage isn't zero any more: its 36 registers in columns below K
    assert reference.parse_header(reference.pack(np.tile(bits, (4, 1)), "huffman")).layout == "huffman"
    bits = np.vstack([bits, np.full((200, 200), 0x3F80, np.uint16)])
    header = reference.parse_header(reference.pack(bits, "nibble"))
    assert (header.layout, header.patches) == ("nibble", 36)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_does_not_pay_is_raw(layout):
    bits = content("any bits", (64, 128))
    packed = reference.pack(bits, layout)
    assert reference.parse_header(packed).layout == "raw"
    assert np.array_equal(packed, reference.pack(bits, "raw"))
