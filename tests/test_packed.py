"""pack, unpack, transcode, verify, info and pad_row_bytes through the compiled codec."""

import re
import warnings

import pytest
import torch
from capability import CAPABILITIES, capability
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import (
    CONTENTS,
    LAYOUTS,
    SHAPES,
    assert_same_bits,
    assert_same_bytes,
    keep_for_the_sanitizers,
    weight,
)

import unweight_ext as u
from unweight_ext.packed import layout_id

VERSION_BYTE, LAYOUT_BYTE, FIRST_CHECKED_BYTE = 8, 10, 16

matrices = st.builds(
    weight, st.sampled_from(sorted(CONTENTS)), st.integers(1, 150), st.integers(1, 400), st.integers(0, 2**32 - 1)
)


def pack(w: torch.Tensor, layout: str, **options: object) -> torch.Tensor:
    """`pack` for tests that don't mind which layout comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        return u.pack(w, layout, **options)


def changed(packed: torch.Tensor, at: int, value: int) -> torch.Tensor:
    copy = packed.clone()
    copy.view(-1)[at] = value
    return copy


# ------------------------------------------------------------------------------------------------- every bit comes back


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_of_edge_shapes(shape, layout, level):
    for content in CONTENTS:
        w = weight(content, *shape)
        with capability(level):
            packed = pack(w, layout)
            assert packed.dtype == torch.uint8 and packed.shape[0] == shape[0]
            u.verify(packed)
            assert_same_bits(u.unpack(packed), w)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(w=matrices)
def test_round_trip(layout, level, w):
    with capability(level):
        assert_same_bits(u.unpack(pack(w, layout)), w)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bf16_value_comes_back(layout):
    w = torch.arange(65536).to(torch.int32).short().view(torch.bfloat16).view(256, 256)
    assert_same_bits(u.unpack(pack(w, layout)), w)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (70, 3, 2, 2), (2, 1, 1, 1, 1, 1, 1, 3)], ids=str)
def test_other_ranks_keep_their_shape(shape, layout):
    w = weight("few outsiders", shape[0], torch.Size(shape[1:]).numel()).view(shape)
    packed = pack(w, layout)
    assert packed.dim() == 2 and packed.shape[0] == shape[0]
    assert u.info(packed).shape == shape
    assert_same_bits(u.unpack(packed), w)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (4, 64, 128), (3, 65, 257)], ids=str)
def test_stacked_matrices_are_packed_matrices(shape, layout):
    w = torch.stack([weight("trained", *shape[1:], seed=e) for e in range(shape[0])])
    packed = pack(w, layout, stacked=True)
    assert packed.shape[:2] == shape[:2] and packed[0].numel() % 128 == 0
    u.verify(packed)
    assert_same_bits(u.unpack(packed), w)
    about = u.info(packed)
    assert (about.matrices, about.shape, about.nbytes) == (shape[0], shape, packed.numel())
    for e in range(shape[0]):
        assert_same_bits(u.unpack(packed[e]), w[e])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout):
    w = weight("trained", 96, 260)
    plain = pack(w, layout)
    for strided in (w.t().contiguous().t(), torch.cat([w, w], 1)[:, :260], w.unsqueeze(0).expand(2, -1, -1)[1]):
        assert_same_bytes(pack(strided, layout), plain)
    assert_same_bits(u.unpack(pack(w.t(), layout)), w.t().contiguous())


def test_threads_and_gradients_do_not_matter():
    w = weight("few outsiders", 300, 700)
    assert_same_bytes(pack(w, "nibble", threads=1), pack(w, "nibble"))
    packed = u.pack(w.clone().requires_grad_())
    assert_same_bytes(packed, u.pack(w))
    assert not packed.requires_grad


# -------------------------------------------------------------------------------------------------------------- layouts


def test_trained_weights_get_the_layout_asked_for_and_its_size():
    w = weight("trained", 1024, 1024)
    bits = {layout: u.info(u.pack(w, layout)).bits_per_weight for layout in LAYOUTS}  # a warning would be an error
    assert {layout: u.info(u.pack(w, layout)).layout for layout in LAYOUTS} == {layout: layout for layout in LAYOUTS}
    assert 10.5 < bits["archive"] < bits["huffman"] < 11.3 < 12 < bits["nibble"] < 12.2 < 16 < bits["raw"] < 16.1


@pytest.mark.parametrize(
    "content, asked, used",
    [
        ("pruned", "nibble", "huffman"),
        ("subnormals", "nibble", "huffman"),
        ("stripes", "nibble", "huffman"),
        ("any bits", "nibble", "raw"),
        ("any bits", "huffman", "raw"),
    ],
)
def test_fallback_says_so_and_keeps_every_bit(content, asked, used):
    w = weight(content, 256, 1024)
    with pytest.warns(u.LayoutFallback, match=rf"layout: '{asked}' was asked for, '{used}' is used: \w+"):
        packed = u.pack(w, asked)
    assert u.info(packed).layout == used
    assert_same_bits(u.unpack(packed), w)


def test_auto_falls_back_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert u.info(u.pack(weight("trained", 128, 256))).layout == "nibble"
        assert u.info(u.pack(weight("pruned", 128, 256))).layout == "huffman"


def test_auto_is_huffman_on_cuda():
    assert layout_id("auto", "cuda") == layout_id("huffman")


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_transcode_gives_what_pack_gives(source, target, level):
    with capability(level), warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        for content in CONTENTS:
            for shape in ((1, 1), (65, 129), (130, 1100)):
                w = weight(content, *shape)
                assert_same_bytes(u.transcode(pack(w, source), target), pack(w, target), (content, shape))


def test_transcode_keeps_shape_and_stacking_and_ignores_padding():
    w = torch.stack([weight("trained", 64, 300, seed=e) for e in range(3)])
    packed = u.pack(w, "archive", stacked=True)
    assert_same_bytes(u.transcode(packed, "nibble"), u.pack(w, "nibble", stacked=True))
    with pytest.warns(UserWarning, match="stacked=True"):
        as_one = u.pack(w, "nibble")
    assert u.info(u.transcode(as_one, "huffman")).shape == (3, 64, 300)
    one = u.pack(w[0], "nibble")
    assert_same_bytes(u.transcode(u.pad_row_bytes(one, one.shape[1] + 100), "nibble"), one)


def test_transcode_says_when_it_falls_back():
    with pytest.warns(u.LayoutFallback, match="'nibble' was asked for, 'huffman' is used"):
        u.transcode(u.pack(weight("pruned", 128, 256), "huffman"), "nibble")


# ----------------------------------------------------------------------------------------------------- info and padding


def test_info():
    w = weight("few outsiders", 200, 384)
    packed = u.pack(w, "nibble")
    about = u.info(packed)
    assert (about.layout, about.shape, about.out_features, about.in_features) == ("nibble", (200, 384), 200, 384)
    assert (about.row_bytes, about.nbytes, about.matrices) == (packed.shape[1], packed.numel(), 1)
    assert about.nbytes - 200 < about.used_bytes <= about.nbytes
    assert about.bits_per_weight == 8 * packed.numel() / w.numel()
    assert about.patches > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_changes_nothing_but_the_size(layout):
    w = weight("trained", 65, 129)
    packed = u.pack(w, layout)
    wide = u.pad_row_bytes(packed, packed.shape[1] + 37)
    assert wide.shape == (65, packed.shape[1] + 37)
    u.verify(wide)
    assert_same_bits(u.unpack(wide), w)
    assert_same_bytes(u.pad_row_bytes(wide, packed.shape[1]), packed)
    with pytest.raises(ValueError, match=f"row_bytes: 10, expected at least {packed.shape[1]}"):
        u.pad_row_bytes(packed, 10)


def test_experts_packed_as_one_matrix_are_told_of_stacked():
    w = torch.stack([weight("trained", 64, 128, seed=e) for e in range(2)])
    with pytest.warns(
        UserWarning, match=r"\[2, 64, 128\] takes \d+ bytes packed as one matrix \[2, 8192\].*stacked=True"
    ):
        u.pack(w)
    assert u.pack(w, stacked=True).numel() < w.nbytes


def test_a_matrix_of_several_megabytes_is_resized_whole():
    packed = u.pack(weight("trained", 700, 3000), "nibble", threads=1)
    same, wide = u.pad_row_bytes(packed, packed.shape[1]), u.pad_row_bytes(packed, packed.shape[1] + 2000)
    assert same.data_ptr() != packed.data_ptr()
    assert_same_bytes(same, packed)
    assert_same_bytes(wide.view(-1)[: packed.numel()], packed.view(-1))
    assert not wide.view(-1)[packed.numel() :].any()


def test_padding_of_stacked_matrices_keeps_them_aligned():
    w = torch.stack([weight("trained", 24, 300, seed=e) for e in range(3)])
    packed = u.pack(w, stacked=True)
    wide = u.pad_row_bytes(packed, packed.shape[2] + 16)
    u.verify(wide)
    assert_same_bits(u.unpack(wide), w)
    with pytest.raises(ValueError, match=r"row_bytes: .*, expected 24 rows of it to be a multiple of 128 bytes"):
        u.pad_row_bytes(packed, packed.shape[2] + 1)


# -------------------------------------------------------------------------------------------------------- damaged bytes

damages = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(content=st.sampled_from(["trained", "few outsiders", "zero rows"]), damage=damages)
def test_damaged_bytes_raise_and_never_give_a_wrong_weight(layout, level, content, damage):
    packed = pack(weight(content, 65, 150), layout)
    bad = packed.clone()
    flat = bad.view(-1)
    for where, flip in damage:
        flat[int(where * flat.numel())] ^= flip
    if torch.equal(bad, packed):
        return
    keep_for_the_sanitizers(bad)
    with capability(level):
        for function in (u.unpack, u.verify, lambda p: u.transcode(p, "raw")):
            with pytest.raises(ValueError, match=r"^packed"):
                function(bad)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 8 * 128 - 1), min_size=1, max_size=4))
def test_damaged_headers_raise(layout, level, bits):
    packed = pack(weight("trained", 70, 260), layout)
    bad = packed.clone()
    for bit in bits:
        bad.view(-1)[bit // 8] ^= 1 << bit % 8
    if torch.equal(bad, packed):
        return
    keep_for_the_sanitizers(bad)
    with capability(level):
        for function in (u.unpack, u.verify, lambda p: u.transcode(p, "raw")):
            with pytest.raises(ValueError, match=r"^(packed|in_features)"):
                function(bad)
        try:
            u.info(bad)  # checks no checksums, but must not crash
        except ValueError as error:
            assert str(error).startswith("packed")


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=1, max_size=600), magic=st.booleans())
def test_arbitrary_bytes_raise(data, magic):
    packed = torch.frombuffer(bytearray(b"UNWEIGHT" + bytes(2) + data if magic else data), dtype=torch.uint8)[None]
    keep_for_the_sanitizers(packed)
    for function in (u.unpack, u.verify, lambda p: u.transcode(p, "raw")):
        with pytest.raises(ValueError, match=r"^packed"):
            function(packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_bytes_raise(layout):
    packed = pack(weight("trained", 64, 256), layout)
    flat = packed.view(-1)
    for size in (1, 8, 64, 127, 128, 200, 1024, flat.numel() // 2, u.info(packed).used_bytes - 64):
        size -= size % 64 if size > 64 else 0
        shape = (64, -1) if size >= 64 else (1, -1)
        with pytest.raises(ValueError, match=r"^packed"):
            u.unpack(flat[:size].reshape(shape))


# --------------------------------------------------------------------------------------------------------------- errors

GOOD = weight("trained", 64, 128)
PACKED = u.pack(GOOD)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: u.pack(GOOD.float()), "weight: dtype torch.float32, expected torch.bfloat16"),
        (lambda: u.pack(GOOD[0]), "weight: 1 dimensions, expected 2 to 8"),
        (lambda: u.pack(GOOD.view(64, 128, *[1] * 7)), "weight: 9 dimensions, expected 2 to 8"),
        (lambda: u.pack(GOOD[:0]), r"weight: shape \[0, 128\] has no elements"),
        (lambda: u.pack(GOOD.to("meta")), "weight: device meta, expected cpu or cuda"),
        (lambda: u.pack(GOOD.to_sparse()), "weight: torch.sparse_coo, expected torch.strided"),
        (lambda: u.pack(GOOD, stacked=True), "weight: 2 dimensions, expected 3 for stacked=True"),
        (lambda: u.pack(GOOD, threads=-1), "threads: -1, expected 0"),
        (
            lambda: u.pack(GOOD, "zip"),
            "layout: 'zip', expected one of 'auto', 'archive', 'huffman', 'nibble', 'raw'",
        ),
        (lambda: u.transcode(PACKED, "zip"), "layout: 'zip', expected one of"),
        (lambda: u.transcode(PACKED, "raw", threads=-2), "threads: -2"),
        (lambda: u.unpack(PACKED.view(-1)), r"packed: shape \[\d+\], expected \[out_features, row_bytes\]"),
        (lambda: u.unpack(PACKED[:0]), r"packed: shape \[0, \d+\]"),
        (lambda: u.unpack(PACKED.view(torch.int8)), "packed: dtype torch.int8, expected torch.uint8"),
        (lambda: u.unpack(PACKED.to("meta")), "packed: device meta, expected cpu or cuda"),
        (lambda: u.unpack(torch.zeros(64, 400, dtype=torch.uint8)), "packed: not a packed weight"),
        (lambda: u.unpack(PACKED.view(32, -1)), "packed_w: its shape says 32 out_features, its header 64"),
        (lambda: u.unpack(changed(PACKED, VERSION_BYTE, 3)), "packed: format version 3, this build reads version 1"),
        (lambda: u.info(changed(PACKED, LAYOUT_BYTE, 9)), "packed: header field layout is 9"),
        (lambda: u.verify(changed(PACKED, FIRST_CHECKED_BYTE, 0)), "packed: the header's checksum"),
        (lambda: u.verify(changed(PACKED, PACKED.numel() // 2, 77)), "packed: the checksum of row block 0"),
    ],
)
def test_errors_name_the_argument_what_it_got_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("call", [lambda: u.pack([1, 2]), lambda: u.unpack(b"UNWEIGHT"), lambda: u.info(None)])
def test_other_types_raise_type_errors(call):
    with pytest.raises(TypeError, match=r"threads: str, expected an int"):
        u.pack(GOOD, threads="2")
    with pytest.raises(TypeError, match=r"expected a torch.Tensor"):
        call()


def test_python_and_operators_say_the_same():
    bad = changed(PACKED, PACKED.numel() // 2, 77)
    with pytest.raises(ValueError) as python:
        u.verify(bad)
    with pytest.raises(RuntimeError, match=re.escape(str(python.value))):
        torch.ops.unweight._verify(bad)


@pytest.mark.parametrize("layout", ["nibble", "archive"])
def test_no_two_flipped_bits_cancel_in_the_checksum(layout):
    """Word weights 1, 2, 3… would miss bit b + 1 of one word against bit b of the word of twice its weight."""
    packed = u.pack(weight("trained", 64, 256), layout)
    start = torch.ops.unweight._describe(packed).tolist()[9]  # where the data are
    words = packed.view(-1)[start : start + 4096].view(torch.int32)
    for t in (7, 100, 300):
        damaged = packed.clone()
        flips = damaged.view(-1)[start : start + 4096].view(torch.int32)
        for bit in range(4, 20):
            a, b = int(words[t]) >> (bit + 1) & 1, int(words[2 * t + 1]) >> bit & 1
            if a == b:
                continue
            flips[t] ^= 1 << (bit + 1)
            flips[2 * t + 1] ^= 1 << bit
            break
        with pytest.raises(ValueError, match="checksum"):
            u.unpack(damaged)


def test_least_bytes_is_a_bound():
    for shape in ((1, 1), (65, 129), (300, 3), (128, 256)):
        w = weight("trained", *shape)
        for number, layout in enumerate(("raw", "huffman", "nibble", "archive")):
            packed = u.pack(w, layout)
            if u.info(packed).layout == layout:
                assert torch.ops.unweight._least_bytes(number, *shape) <= u.info(packed).used_bytes
    assert torch.ops.unweight._least_bytes(2, 2**30, 1) == 2**63 - 1  # more tiles than the index can count
    assert torch.ops.unweight._least_bytes(3, 2**30, 1) < 2**31
