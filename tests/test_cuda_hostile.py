"""Bytes made to hurt: kernels report damage and end, and never touch what isn't theirs (the interpreter would say so).

Where the CPU raises, the device does. Where the device accepts what it is given, so does the CPU, and the weights are
the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_reading import NAN, Loaded, pack
from hostile import CASES, COLUMNS, PACKED, SHAPES, WEIGHTS, Damaged, warp_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_module import native
from reference_cases import content, seal
from samples import LAYOUTS, assert_same_bits
from torch import Tensor

from unweight_ext import reference

pytestmark = pytest.mark.usefixtures("every_architecture")
EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MORE_EXAMPLES = settings(EXAMPLES, max_examples=100)


def cpu(packed: np.ndarray, columns: int) -> Tensor | None:
    """The weights, or None where the CPU refuses."""
    try:
        return torch.ops.unweight.unpack(torch.from_numpy(packed), columns, torch.bfloat16)
    except RuntimeError:
        return None


def check(packed: np.ndarray, columns: int, *, may_differ: bool = False, rows: int | None = None) -> None:
    """Unpacks and looks rows up. may_differ: words that lie outside their stage are anything, here and there."""
    loaded = Loaded(torch.from_numpy(packed), columns, rows=rows)
    expected = cpu(packed, columns)
    try:
        got = loaded.unpack()
    except native.Error:
        pass
    else:
        assert expected is not None, "the device accepts what the CPU refuses"
        if not may_differ:
            assert_same_bits(got, expected)
    again = Loaded(torch.from_numpy(packed), columns, rows=rows)
    ids = [0, again.rows - 1, again.rows // 2]
    found = again.embedding(ids)
    if again.damage()[0] and again.damage()[0] <= 2:  # the header: no row can be trusted
        assert bool((found.view(torch.int16) == NAN).all())


def check_damaged(damaged: Damaged) -> None:
    check(damaged.packed, damaged.columns, may_differ=damaged.may_differ, rows=damaged.rows)


@pytest.mark.parametrize(("attack", "arguments"), CASES, ids=[attack.__name__ for attack, _ in CASES])
def test_damage(attack, arguments) -> None:
    EXAMPLES(given(st.tuples(*arguments))(lambda drawn: check_damaged(attack(*drawn))))()


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "arguments"), CASES, ids=[attack.__name__ for attack, _ in CASES])
def test_much_damage(attack, arguments) -> None:
    MORE_EXAMPLES(given(st.tuples(*arguments))(lambda drawn: check_damaged(attack(*drawn))))()


def index_of(flat: np.ndarray) -> np.ndarray:
    begin, end = (int(x) for x in flat[48:64].view("<u8"))
    return flat[begin:end].view("<u4")


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_a_stage_longer_than_a_slot(layout: str) -> None:
    """All of its bytes are the tensor's, but there is no room for them."""
    packed = PACKED[layout].copy()
    index = index_of(packed.reshape(-1))
    index[1:3] = index[3] - 2, index[3] - 1
    seal(packed)
    with pytest.raises(native.Error, match=r"^packed: the index gives stage 0 a place"):
        Loaded(torch.from_numpy(packed), COLUMNS[layout]).unpack()
    check(packed, COLUMNS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_far_outside(layout: str) -> None:
    packed = PACKED[layout].copy()
    index_of(packed.reshape(-1))[1] = 0x0FFFFFFF
    seal(packed)
    check(packed, COLUMNS[layout])


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_stages_without_room_for_signs(layout: str) -> None:
    packed = PACKED[layout].copy()
    index_of(packed.reshape(-1))[1] = 1
    seal(packed)
    with pytest.raises(
        native.Error, match="^packed: the index gives stage 0 a place outside the data, or one too small"
    ):
        Loaded(torch.from_numpy(packed), COLUMNS[layout]).unpack()
    check(packed, COLUMNS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_end_that_is_cut_off(layout: str) -> None:
    used = int(PACKED[layout].reshape(-1)[40:48].view("<u8")[0])
    rows, row_bytes = PACKED[layout].shape
    missing = -(-(rows * row_bytes - used + 1) // rows)
    packed = PACKED[layout].reshape(-1)[: rows * (row_bytes - missing)].reshape(rows, -1).copy()
    with pytest.raises(native.Error, match=r"^packed: header says \d+ bytes are used; there are \d+"):
        Loaded(torch.from_numpy(packed), COLUMNS[layout]).unpack()
    check(packed, COLUMNS[layout])


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_sections_outside_their_stage(layout: str) -> None:
    size = 16 * int(index_of(PACKED[layout].reshape(-1))[1])
    for section, ksteps, patches in ((0, 0, 0), (2047, 0, 0), (8191, 0, 0), (size // 4 - 2, 1, 100)):
        packed = PACKED[layout].copy()
        flat = packed.reshape(-1)
        data = int(flat[64:72].view("<u8")[0])
        flat[data + 4 : data + 8].view("<u4")[0] = warp_header(section, False, False, ksteps, patches)
        seal(packed)
        with pytest.raises(native.Error, match=r"^packed: stage 0, warp 1: its patches are outside the stage"):
            Loaded(torch.from_numpy(packed), COLUMNS[layout]).unpack()
        check(packed, COLUMNS[layout])
        a_row_is_refused(packed, layout, 20, r"^packed: stage 0, warp 1: its patches are outside the stage")


def a_row_is_refused(packed: np.ndarray, layout: str, row: int, message: str) -> None:
    loaded = Loaded(torch.from_numpy(packed), COLUMNS[layout])
    assert bool((loaded.embedding([row]).view(torch.int16) == NAN).all())
    with pytest.raises(native.Error, match=message):
        loaded.raise_damage()


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_rows_of_short_stages_that_say_they_are_raw(layout: str) -> None:
    """The last stage: what a raw one had more of would lie behind the tensor."""
    packed = PACKED[layout].copy()
    flat = packed.reshape(-1)
    data = int(flat[64:72].view("<u8")[0])
    index = index_of(flat)
    last = int(np.argmax(16 * index.astype(int) + data == int(flat[40:48].view("<u8")[0]))) - 1
    start, size = data + 16 * int(index[last]), 16 * int(index[last + 1] - index[last])
    assert size < 16400
    flat[start : start + 4].view("<u4")[0] |= 1 << 14
    seal(packed)
    a_row_is_refused(
        packed, layout, SHAPES[layout][0] - 1, f"^packed: stage {last} says that it is raw, but is shorter"
    )
    check(packed, COLUMNS[layout])


def test_rows_with_more_patches_than_k_steps_that_have_some() -> None:
    packed = PACKED["nibble"].copy()
    flat = packed.reshape(-1)
    data = int(flat[64:72].view("<u8")[0])
    header = flat[data : data + 4].view("<u4")
    patches = int(header[0]) >> 24
    assert patches > 1 and header[0] >> 16 & 0xFF
    section = data + 4 * (int(header[0]) & 0x1FFF) + 4 * (int(header[0]) >> 13 & 1)
    flat[section : section + 4 * patches].view("<u4")[:] &= 0x7FFFFFFF  # each ends a k-step
    header[0] = header[0] & ~np.uint32(0xFF0000) | np.uint32(0x010000)
    seal(packed)
    a_row_is_refused(packed, "nibble", 0, "^packed: stage 0, warp 0: its patches don't belong to the k-steps")
    check(packed, COLUMNS["nibble"])


def test_patches_that_go_on_behind_their_end() -> None:
    """Each says that another follows, up to the end of the stage and beyond."""
    packed = PACKED["huffman"].copy()
    flat = packed.reshape(-1)
    data = int(flat[64:72].view("<u8")[0])
    size = 16 * int(index_of(flat)[1])
    flat[data : data + 4].view("<u4")[0] = warp_header(2052, False, False, 0x81, 255)
    flat[data + 8208 : data + size] = 0xFF
    seal(packed)
    with pytest.raises(native.Error, match=r"^packed: stage 0, warp 0: its patches"):
        Loaded(torch.from_numpy(packed), COLUMNS["huffman"]).unpack()
    check(packed, COLUMNS["huffman"])


@pytest.mark.parametrize("last", [None, WEIGHTS // 2 + 1, 0xFFFFFFFF])
def test_positions_of_archive_patches(last: int | None) -> None:
    """All the same (None): two threads would write one place. Or the last one lies behind the chunk's weights."""
    packed = PACKED["archive"].copy()
    flat = packed.reshape(-1)
    data = int(flat[64:72].view("<u8")[0])
    patches = int(flat[data : data + 4].view("<u4")[0])
    assert patches > 2
    at = data + 16 + (WEIGHTS + 15) // 16 * 16
    positions = flat[at : at + 4 * patches].view("<u4")
    if last is None:
        positions[:] = 5
    else:
        positions[-1] = last
    seal(packed)
    with pytest.raises(native.Error, match=r"^packed: chunk 0: its patches"):
        Loaded(torch.from_numpy(packed), COLUMNS["archive"]).unpack()
    check(packed, COLUMNS["archive"])


@pytest.mark.parametrize("layout", ["huffman", "archive"])
def test_more_codes_than_there_is_space_for(layout: str) -> None:
    packed = PACKED[layout].copy()
    flat = packed.reshape(-1)
    counts = flat[128:160].view("<u2")
    # The same number of codes, so the rest of the header stays as it is, but the table's id: all of one bit.
    counts[1], counts[2:] = counts.sum(), 0
    assert counts[1] > 2
    table = flat[128 : 160 + 2 * int(counts[1])]
    flat[72:80].view("<u8")[0] = reference.checksum(np.append(table, np.zeros(-len(table) % 4, np.uint8)))
    seal(packed)
    with pytest.raises(native.Error, match="code"):
        Loaded(torch.from_numpy(packed), COLUMNS[layout]).unpack()
    check(packed, COLUMNS[layout])


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_sections_of_warps_behind_the_last_row(layout: str) -> None:
    """Nothing of them is stored, and they are refused like any other."""
    weights = torch.from_numpy(content("few outsiders", (3, 40)).view(np.int16)).view(torch.bfloat16)
    good = pack(weights, layout)
    for bits in (warp_header(8191, False, False, 0, 0), warp_header(2052 + 1024, False, False, 2, 0)):
        packed = good.numpy().copy()
        flat = packed.reshape(-1)
        data = int(flat[64:72].view("<u8")[0])
        flat[data + 12 : data + 16].view("<u4")[0] = bits
        seal(packed)
        with pytest.raises(native.Error, match=r"^packed: stage 0, warp 3: its patches"):
            Loaded(torch.from_numpy(packed), 40).unpack()
        check(packed, 40)


def _mixed_stack(rows: int, columns: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """One matrix of each layout, and its weights: no packer makes such a stack, and every matrix is right."""
    weights = [content("any bits" if layout == "raw" else "trained", (rows, columns), seed=i)
               for i, layout in enumerate(LAYOUTS)]  # fmt: skip
    parts = [
        pack(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), layout).numpy().reshape(-1)
        for bits, layout in zip(weights, LAYOUTS, strict=True)
    ]
    row_bytes = -(-max(part.size for part in parts) // (128 * rows)) * 128
    stack = np.zeros((len(parts), rows, row_bytes), np.uint8)
    for matrix, part in zip(stack, parts, strict=True):
        matrix.reshape(-1)[: part.size] = part
    return stack, weights


def test_stacks_of_every_layout() -> None:
    stack, weights = _mixed_stack(3, 130)
    loaded = Loaded(torch.from_numpy(stack), 130)
    got = loaded.unpack()
    assert np.array_equal(got.view(torch.int16).numpy().view(np.uint16), np.stack(weights))
    for layout in (1, 3):
        with pytest.raises(native.Error, match=f"^layout: {LAYOUTS[layout]}, but matrix 0 is raw"):
            Loaded(torch.from_numpy(stack), 130, layout=layout).unpack()


@pytest.mark.parametrize("number", range(4))
def test_one_damaged_matrix_of_a_stack(number: int) -> None:
    """Its index goes backwards, or gives two units one place: the others are decoded, and it is named."""
    stack, _ = _mixed_stack(3, 130)
    index = index_of(stack[number].reshape(-1))
    if len(index) > 2 and LAYOUTS[number] != "archive":
        index[1], index[2] = int(index[2]), int(index[1])
    else:
        stack[number].reshape(-1)[24] += 1  # an archive's one chunk: its header means another matrix
    seal(stack[number])
    loaded = Loaded(torch.from_numpy(stack), 130)
    with pytest.raises(native.Error):
        loaded.unpack()
    assert loaded.damage()[1] == number
    assert cpu(stack, 130) is None
