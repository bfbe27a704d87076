"""embedding on the device: rows as the CPU gives them, NaN where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_reading import ANY, NAN, Loaded, layout_number, pack
from native_module import native
from reference_cases import CONTENTS, content, seal, stages_of
from samples import LAYOUTS, assert_same_bits, weight
from torch import Tensor

from unweight_ext.packed import info, pack_quietly

pytestmark = pytest.mark.usefixtures("every_architecture")


def bfloat16(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def nan_rows(rows: Tensor) -> list[int]:
    return [i for i, row in enumerate(rows.view(torch.int16)) if bool((row == NAN).all())]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (70, 130), (66, 132), (3, 4224), (130, 301)], ids=str)
def test_shapes(layout: str, shape: tuple[int, int]) -> None:
    expected = weight("few outsiders", *shape)
    packed = pack_quietly(expected, layout)
    ids = sorted({0, shape[0] - 1, shape[0] // 2})
    for seed in (0, 5):
        loaded = Loaded(packed, shape[1], seed=seed)
        assert_same_bits(loaded.embedding(ids), expected[ids])
        assert loaded.damage() == (0, 0, 0)


@pytest.mark.parametrize("name", CONTENTS)
def test_every_row_of_a_block(name: str) -> None:
    """Rows in each place of a warp; patches of the row, of its neighbours, zero rows, raw stages."""
    bits = content(name, (64, 130), seed=4)
    for layout in LAYOUTS[1:3]:
        ids = list(range(0, 64, 5))
        got = Loaded(pack_quietly(bfloat16(bits), layout), 130, seed=2).embedding(ids)
        assert_same_bits(got, bfloat16(bits)[ids])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_repeat_and_may_be_narrow(layout: str) -> None:
    expected = weight("any bits" if layout == "raw" else "trained", 70, 136)
    ids = [69, 0, 0, 33, 69]
    loaded = Loaded(pack(expected, layout), 136, layout=layout_number(layout))
    assert_same_bits(loaded.embedding(ids, wide=False), expected[ids])
    assert_same_bits(loaded.embedding(ids, wide=True), expected[ids])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wide", [True, False])
def test_ids_outside_give_nan_and_a_status(layout: str, wide: bool) -> None:
    expected = weight("any bits" if layout == "raw" else "trained", 70, 128)
    loaded = Loaded(pack(expected, layout), 128)
    outside = [70, -1, -(2**31), 2**31 - 1, *([2**40, -(2**63)] if wide else [])]
    rows = loaded.embedding([5, *outside, 69], wide)
    assert nan_rows(rows) == list(range(1, len(outside) + 1))
    assert_same_bits(rows[[0, -1]], expected[[5, 69]])
    with pytest.raises(native.Error, match=r"^ids: element 1 is outside 0 to 69$"):
        loaded.raise_damage()


@pytest.mark.parametrize("layout", ["raw", "nibble", "huffman"])
def test_a_damaged_stage_makes_its_rows_nan(layout: str) -> None:
    """All of the row, whichever part is damaged; other blocks are as they were."""
    expected = weight("any bits" if layout == "raw" else "trained", 130, 264)
    packed = pack(expected, layout)
    stage = stages_of(packed.numpy())[3 + 1]  # rows 64 to 127, columns 128 to 255
    stage[:16].view("<u4")[:] = 0 if layout == "raw" else 0x1FFF
    loaded = Loaded(packed, 264)
    rows = loaded.embedding([0, 64, 100, 129])
    assert nan_rows(rows) == [1, 2]
    assert_same_bits(rows[[0, 3]], expected[[0, 129]])
    with pytest.raises(native.Error, match=r"^packed: stage 4"):
        loaded.raise_damage()


def test_patches_of_another_row_are_checked_too() -> None:
    """The CPU says that they don't fit; so does the device, whichever row of the warp is asked for."""
    bits = content("trained", (64, 256), seed=1)
    bits[3, 5] = bits[9, 77] = 0x7F80
    packed = pack(bfloat16(bits), "huffman")
    stage = stages_of(packed.numpy())[0]
    assert stage[:4].view("<u4")[0] >> 24 > 0
    stage[:4].view("<u4")[0] ^= 1 << 16 + 3  # a k-step that has no patches, or has
    seal(packed.numpy())
    loaded = Loaded(packed, 256)
    assert nan_rows(loaded.embedding([0, 15, 16])) == [0, 1]
    with pytest.raises(native.Error, match=r"^packed: stage 0, warp 0: its patches don't belong"):
        loaded.raise_damage()


def test_archive_patches() -> None:
    bits = content("half noise", (100, 257), seed=7)
    packed = pack(bfloat16(bits), "archive")
    assert info(packed).patches > 0
    loaded = Loaded(packed, 257)
    assert_same_bits(loaded.embedding([0, 77, 99]), bfloat16(bits)[[0, 77, 99]])


def test_a_header_that_is_damaged_makes_all_rows_nan() -> None:
    for layout in ("nibble", "archive"):
        packed = pack(weight("trained", 70, 128), layout)
        packed.view(-1)[0] ^= 1
        loaded = Loaded(packed, 128)
        if layout == "nibble":
            assert nan_rows(loaded.embedding([1, 2])) == [0, 1]
        else:
            assert nan_rows(loaded.embedding([1])) == [0]
        with pytest.raises(native.Error, match="not a packed weight"):
            loaded.raise_damage()


def test_a_known_layout_is_one_launch() -> None:
    packed = native.PackedMatrices(256, 1 << 20, 640, 128, layout=layout_number("nibble"))
    plans = native.plan_embedding(packed, 256, True, 10_000, 512, 0, 132)
    assert [(plan.kernel, plan.grid) for plan in plans] == [("unweight_embedding_tiles", 2 * 132)]
    unknown = native.PackedMatrices(256, 1 << 20, 640, 128, layout=ANY)
    kernels = [plan.kernel for plan in native.plan_embedding(unknown, 256, True, 3, 512, 0, 132)]
    assert kernels == ["unweight_embedding_tiles", "unweight_embedding_archive"]
    assert native.plan_embedding(unknown, 256, True, 0, 512, 0, 132) == []
    with pytest.raises(native.Error, match="^packed: 2 matrices, expected one"):
        native.plan_embedding(native.PackedMatrices(256, 1 << 20, 640, 128, 2), 256, True, 3, 512, 0, 132)
