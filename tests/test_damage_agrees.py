"""Both instruction sets refuse the same damage, also that of warps whose rows lie past N, which nobody decodes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from capability import CAPABILITIES, capability
from reference_cases import content, seal

from unweight_ext import packed as packed_module

ROWS = (10, 16, 30, 33, 48, 64, 74, 100)
COLUMNS = 300
TOKENS = (1, 4, 5, 40)


def _pack(layout: str, rows: int) -> torch.Tensor:
    bits = content("few outsiders", (rows, COLUMNS), seed=rows)
    packed = packed_module.pack_quietly(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), layout)
    assert packed_module.info(packed).layout == layout
    return packed


def _stage(packed: np.ndarray, row: int, number: int) -> np.ndarray:
    """The bytes of a stage of the row's block."""
    flat = packed.reshape(-1)
    begin, end, data = (int(x) for x in flat[48:72].view("<u8"))
    index = flat[begin:end].view("<u4")
    unit = row // 64 * -(-COLUMNS // 128) + number
    return flat[data + 16 * int(index[unit]) : data + 16 * int(index[unit + 1])]


def _outside(header: int, size: int) -> int:
    return header & ~0x1FFF | size // 4 + 1


def _in_the_planes(header: int, size: int) -> int:
    return header & ~0x1FFF


def _without_k_steps(header: int, size: int) -> int:
    return header & 0x2000 | 2052 + 1024 | 1 << 24


def _without_patches(header: int, size: int) -> int:
    return header & 0x00FFFFFF | 1 << 23


DAMAGES = (_outside, _in_the_planes, _without_k_steps, _without_patches)


def _said(name: str, *arguments: object) -> str:
    """What an operator says against its arguments: "" if it is content."""
    try:
        getattr(torch.ops.unweight, name)(*arguments)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _readers(forged: torch.Tensor) -> Iterator[tuple[str, tuple[object, ...]]]:
    yield "unpack", (forged, COLUMNS, torch.bfloat16)
    yield "_verify", (forged,)
    for tokens in TOKENS:
        for dtype in (torch.bfloat16, torch.float32):
            yield "linear", (torch.ones(tokens, COLUMNS, dtype=dtype), forged)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_a_damaged_warp(layout: str, rows: int, damage, level: str) -> None:
    good = _pack(layout, rows)
    last_block = (rows - 1) // 64 * 64
    for warp in range(4):
        stage_number = warp % 3
        packed = good.numpy().copy()
        stage = _stage(packed, last_block, stage_number)
        header = stage[4 * warp : 4 * warp + 4].view("<u4")
        header[0] = damage(int(header[0]), stage.size)
        seal(packed)
        forged = torch.from_numpy(packed)
        expected = f"packed: stage {last_block // 64 * 3 + stage_number}, warp {warp}: its patches "
        with capability(level):
            for name, arguments in _readers(forged):
                said = _said(name, *arguments)
                assert said.startswith(expected), f"{name} of {arguments[0].shape}, damaged warp {warp}: {said!r}"
            # A look-up reads the warps of its rows, and no others.
            for row in range(last_block, rows, 16):
                said = _said("embedding", torch.tensor([row]), forged, COLUMNS)
                assert said.startswith(expected) == (row % 64 // 16 == warp), f"row {row}, warp {warp}: {said!r}"


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("rows", [10, 64])
def test_a_zero_row_mask_is_nothing_in_huffman(level: str, rows: int) -> None:
    """Bit 13 of a warp's header belongs to nibble: no room is kept for a mask, even at the stage's very end."""
    packed = _pack("huffman", rows).numpy().copy()
    stage = _stage(packed, 0, 0)
    header = stage[12:16].view("<u4")
    header[0] = stage.size // 4 | 1 << 13
    seal(packed)
    forged = torch.from_numpy(packed)
    with capability(level):
        for name, arguments in _readers(forged):
            assert _said(name, *arguments) == ""
