"""Packed bytes made to hurt: bits flipped anywhere, forged headers, indexes and sections, ends cut off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cuda_reading import pack
from hypothesis import strategies as st
from reference_cases import content, seal
from samples import LAYOUTS

SHAPES = {"raw": (3, 130), "huffman": (66, 257), "nibble": (65, 256), "archive": (100, 257)}
NAMES = {"raw": "any bits", "huffman": "half noise", "nibble": "few outsiders", "archive": "half noise"}


def _packed(layout: str) -> np.ndarray:
    weights = torch.from_numpy(content(NAMES[layout], SHAPES[layout], seed=6).view(np.int16)).view(torch.bfloat16)
    return pack(weights, layout).numpy()


PACKED = {layout: _packed(layout) for layout in LAYOUTS}
WEIGHTS = SHAPES["archive"][0] * SHAPES["archive"][1]
COLUMNS = {layout: SHAPES[layout][1] for layout in LAYOUTS}
layouts = st.sampled_from(LAYOUTS)
place = st.floats(0, 1, exclude_max=True)

# Offset and type of fields of the header, and what they could be.
FIELDS = [
    *((at, "<u1", st.integers(0, 255)) for at in (10, 11, 12, 13, 14, 15)),
    *((at, "<u8", st.sampled_from([0, 1, 63, 64, 1 << 20, 1 << 33, (1 << 64) - 1])) for at in (24, 32)),
    *((at, "<u8", st.integers(0, 1 << 12) | st.integers(0, (1 << 64) - 1)) for at in (40, 48, 56, 64, 72, 80, 88)),
    *((at, "<u4", st.integers(0, 1 << 10)) for at in (96, 100, 104, 124)),
    *((at, "<u2", st.integers(0, 300)) for at in range(128, 160, 2)),  # counts of codes
]
fields = st.sampled_from(FIELDS).flatmap(lambda field: st.tuples(st.just(field[:2]), field[2]))
U32 = st.integers(0, 40) | st.integers(0, 1 << 12) | st.integers(0, (1 << 32) - 1)


@dataclass
class Damaged:
    packed: np.ndarray
    columns: int
    rows: int | None = None  # as the caller says, if not as the tensor's shape says
    may_differ: bool = False  # words that lie outside their stage are anything, here and there


def flip(layout: str, where: float, in_header: bool, sealed: bool) -> Damaged:
    packed = PACKED[layout].copy()
    flat = packed.reshape(-1)
    size = int(flat[64:72].view("<u8")[0]) if in_header else flat.size
    bit = int(where * 8 * size)
    flat[bit // 8] ^= 1 << bit % 8
    if sealed:
        seal(packed)
    return Damaged(packed, COLUMNS[layout], may_differ=sealed)


def forge_field(layout: str, field: tuple[tuple[int, str], int]) -> Damaged:
    packed = PACKED[layout].copy()
    (at, kind), value = field
    flat = packed.reshape(-1)
    flat[at : at + np.dtype(kind).itemsize].view(kind)[0] = value
    seal(packed)
    return Damaged(packed, COLUMNS[layout], may_differ=True)


def forge_index(layout: str, where: float, value: int, relative: bool) -> Damaged:
    packed = PACKED[layout].copy()
    flat = packed.reshape(-1)
    begin, end = (int(x) for x in flat[48:64].view("<u8"))
    index = flat[begin:end].view("<u4")
    at = int(where * len(index))
    index[at] = (int(index[at]) + value - 20 if relative else value) & 0xFFFFFFFF
    seal(packed)
    return Damaged(packed, COLUMNS[layout], may_differ=True)


def forge_unit(layout: str, where: float, words: list[int | None]) -> Damaged:
    """The headers of a stage or a chunk."""
    packed = PACKED[layout].copy()
    flat = packed.reshape(-1)
    begin, end, data = (int(x) for x in flat[48:72].view("<u8"))
    index = flat[begin:end].view("<u4")
    units = int(np.argmax(16 * index.astype(int) + data == int(flat[40:48].view("<u8")[0])))
    start = data + 16 * int(index[int(where * units)])
    for i, word in enumerate(words):
        if word is not None:
            flat[start + 4 * i :][:4].view("<u4")[0] = word
    seal(packed)
    return Damaged(packed, COLUMNS[layout], may_differ=True)


def warp_header(section: int, zero_rows: bool, raw: bool, ksteps: int, patches: int) -> int:
    return section | zero_rows << 13 | raw << 14 | ksteps << 16 | patches << 24


headers = st.builds(
    warp_header,
    st.integers(2040, 4200) | st.integers(0, 8191),
    st.booleans(),
    st.booleans(),
    st.integers(0, 255),
    st.integers(0, 4) | st.integers(120, 255),
)
unit_words = st.lists(st.none() | headers | U32, min_size=4, max_size=4)


def truncate(layout: str, where: float, rows: int) -> Damaged:
    flat = PACKED[layout].reshape(-1)
    size = max(int(where * flat.size) // rows, 1) * rows
    packed = flat[:size].reshape(rows, -1).copy()
    return Damaged(packed, COLUMNS[layout], rows=rows)


CASES = [
    (flip, (layouts, place, st.booleans(), st.booleans())),
    (forge_field, (layouts, fields)),
    (forge_index, (layouts, place, U32, st.booleans())),
    (forge_unit, (layouts, place, unit_words)),
    (truncate, (layouts, place, st.sampled_from([1, 3, 65, 66, 70]))),
]
