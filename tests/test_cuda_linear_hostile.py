"""Bytes made to hurt, multiplied: nothing outside the tensors is touched, the kernel ends, and rows that can't be
decoded are NaN. The product doesn't look at checksums, so what is wrong is told by looking all rows up."""

from __future__ import annotations

import itertools
from functools import cache

import linear_reference as stepped
import numpy as np
import pytest
import torch
from cuda_reading import ANY, NAN, Loaded, layout_number
from hostile import CASES, COLUMNS, PACKED, Damaged, forge_unit, warp_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_product import Product, Weight, assert_same, config, packed, tokens
from samples import LAYOUTS

from unweight_ext import reference

slow = pytest.mark.slow
EXAMPLES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MORE_EXAMPLES = settings(EXAMPLES, max_examples=60)
TOKENS = 2


def multiply(damaged: Damaged, layout: int, size: int = 8) -> np.ndarray:
    """float32 [TOKENS, N]."""
    rows = damaged.rows or damaged.packed.shape[0]
    weight = Weight(damaged.packed.reshape(rows, -1), damaged.columns, layout=layout)
    product = Product([weight], tokens(TOKENS, damaged.columns), config(size), float_output=True, multiprocessors=2)
    return product.run()[0]


@cache
def before_damage(layout: str) -> np.ndarray:
    """Products of all rows, float32 [TOKENS, N]."""
    bits = reference.unpack(PACKED[layout])
    return stepped.sum_chain(stepped.to_float(bits), stepped.to_float(tokens(TOKENS, COLUMNS[layout]))).T


def check(damaged: Damaged, layout: int = ANY, *, exact: bool = False) -> None:
    """Rows that can be decoded are right or NaN; the others are NaN, or what they were before the damage: of a stage
    whose headers don't agree on being raw, the product believes each, a look-up the first. may_differ: rows that can be
    decoded may also be something else.

    A few rows are looked up: one of each warp, at least.
    """
    got = multiply(damaged, layout)
    if damaged.packed.reshape(-1)[10:11].tolist() == [LAYOUTS.index("archive")]:
        assert np.isnan(got).all()
        return
    loaded = Loaded(torch.from_numpy(damaged.packed), damaged.columns, rows=damaged.rows)
    rows = np.unique([*range(5, loaded.rows, 16), loaded.rows - 1])
    found = loaded.embedding(rows.tolist()).view(torch.int16).numpy().view(np.uint16)
    got, bad = got[:, rows], (found == NAN).all(axis=1)
    fine = np.isnan(got)
    for name in LAYOUTS[:3]:
        if PACKED[name].shape == damaged.packed.shape and COLUMNS[name] == damaged.columns:
            fine |= got == before_damage(name)[:, rows]
    assert fine[:, bad].all(), f"rows {rows[bad & ~fine.all(axis=0)].tolist()} aren't NaN"
    if damaged.may_differ:
        return
    expected = stepped.sum_chain(stepped.to_float(found), stepped.to_float(tokens(TOKENS, damaged.columns))).T
    if exact:
        assert_same(got, expected)
    wrong = (got != expected) & ~np.isnan(got)
    assert not wrong.any(), f"rows {rows[wrong.any(axis=0)].tolist()} are neither right nor NaN"


@pytest.mark.parametrize(("attack", "arguments"), CASES, ids=[attack.__name__ for attack, _ in CASES])
def test_damage(attack, arguments) -> None:
    EXAMPLES(given(st.tuples(*arguments))(lambda drawn: check(attack(*drawn))))()


@slow
@pytest.mark.parametrize(("attack", "arguments"), CASES, ids=[attack.__name__ for attack, _ in CASES])
def test_much_damage(attack, arguments) -> None:
    MORE_EXAMPLES(given(st.tuples(*arguments))(lambda drawn: check(attack(*drawn))))()


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_undamaged(layout: str) -> None:
    """The check itself: rows are right, and NaN only where a weight is."""
    for known in (ANY, layout_number(layout)):
        check(Damaged(PACKED[layout], COLUMNS[layout]), known, exact=True)


def test_headers_that_do_not_agree() -> None:
    """Found by chance: the first warp's header isn't that of a raw stage any more, the others' are; a raw matrix, which
    has no code, says of a stage that it is written in one."""
    check(forge_unit("huffman", 0.25, [0, None, None, None]))
    check(forge_unit("raw", 0.0, [None, None, None, 2052]))


def test_archives_are_not_multiplied() -> None:
    assert np.isnan(multiply(Damaged(PACKED["archive"], COLUMNS["archive"]), ANY)).all()


@pytest.mark.parametrize("known", LAYOUTS[:3])
def test_another_layout_than_the_caller_says(known: str) -> None:
    for layout in LAYOUTS:
        if layout != known:
            got = multiply(Damaged(PACKED[layout], COLUMNS[layout]), layout_number(known))
            assert np.isnan(got).all(), (known, layout)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_another_shape_than_the_header_says(layout: str) -> None:
    data = PACKED[layout].reshape(-1)
    rows, columns = PACKED[layout].shape[0], COLUMNS[layout]
    for n, k in ((rows, columns + 1), (rows, columns + 128), (1, columns), (rows, 1)):
        assert np.isnan(multiply(Damaged(data[: data.size // n * n], k, rows=n), ANY)).all(), (n, k)


def with_index(layout: str, changes: dict[int, int]) -> Damaged:
    data = PACKED[layout].copy()
    flat = data.reshape(-1)
    begin, end = (int(x) for x in flat[48:64].view("<u8"))
    for at, value in changes.items():
        flat[begin:end].view("<u4")[at] = value
    return Damaged(data, COLUMNS[layout])


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("place", [0, 1, 0x0FFFFFFF, 0xFFFFFFFF])
def test_a_stage_anywhere(layout: str, place: int) -> None:
    """Empty, too short, behind the end."""
    check(with_index(layout, {1: place}), layout_number(layout) if place % 2 else ANY)


@pytest.mark.parametrize("behind", [-1, 1 << 27])
def test_a_stage_of_usual_length_behind_the_end(behind: int) -> None:
    data = PACKED["nibble"].reshape(-1)
    begin, end, start = (int(x) for x in data[48:72].view("<u8"))
    first, second = (int(x) for x in data[begin:end].view("<u4")[1:3])
    place = (data.size - start) // 16 + behind
    check(with_index("nibble", {1: place, 2: place + second - first}))


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_a_stage_longer_than_a_slot(layout: str) -> None:
    data = PACKED[layout].reshape(-1)
    begin, end = (int(x) for x in data[48:64].view("<u8"))
    third = int(data[begin:end].view("<u4")[3])
    damaged = with_index(layout, {1: third - 2, 2: third - 1})
    check(damaged, layout_number(layout))
    assert np.isnan(multiply(damaged, ANY)[:, :64]).all()


def with_warp_header(layout: str, stage: int, warp: int, bits: int) -> Damaged:
    data = PACKED[layout].copy()
    flat = data.reshape(-1)
    begin, end, start = (int(x) for x in flat[48:72].view("<u8"))
    at = start + 16 * int(flat[begin:end].view("<u4")[stage]) + 4 * warp
    flat[at : at + 4].view("<u4")[0] = bits
    return Damaged(data, COLUMNS[layout])


SECTIONS = [
    *((2052, False, 0, 1), (3076, False, 0, 1), (2052, False, 1, 0), (8191, False, 0, 0), (2047, False, 0, 0)),
    *((3076, True, 0, 0), (2052, False, 0xFF, 255)),
]
MORE_SECTIONS = itertools.product((0, 2047, 2052, 3076, 8191), (False, True), (0, 1, 0x80, 0xFF), (0, 1, 128, 255))


@pytest.mark.parametrize("sections", [SECTIONS, pytest.param(list(MORE_SECTIONS), marks=slow)], ids=["some", "more"])
@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_sections_anywhere(layout: str, sections: list[tuple[int, bool, int, int]]) -> None:
    """Only the warp's own 16 rows can suffer."""
    good = multiply(Damaged(PACKED[layout], COLUMNS[layout]), ANY)
    for number, (section, zeros, ksteps, patches) in enumerate(sections):
        warp = number % 4
        damaged = with_warp_header(layout, 0, warp, warp_header(section, zeros, False, ksteps, patches))
        got = multiply(damaged, ANY)
        others = np.arange(good.shape[1]) // 16 != warp
        assert_same(got[:, others], good[:, others], f"{section, zeros, ksteps, patches}")
        if section in (2047, 8191) or (patches == 0) != (ksteps == 0):
            assert np.isnan(got[:, ~others]).all(), (section, zeros, ksteps, patches)


@pytest.mark.parametrize("bits", [0x8000, 0xA000, 0xC000])
@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_a_kind_of_stage_that_there_is_not(layout: str, bits: int) -> None:
    """A warp whose header is right but for a bit that is nobody's, alone or with others, gives NaN."""
    data = PACKED[layout].reshape(-1)
    begin, end, start = (int(x) for x in data[48:72].view("<u8"))
    good = multiply(Damaged(PACKED[layout], COLUMNS[layout]), ANY)
    for warp in range(4):
        at = start + 16 * int(data[begin:end].view("<u4")[0]) + 4 * warp
        damaged = with_warp_header(layout, 0, warp, int(data[at : at + 4].view("<u4")[0]) ^ bits)
        for known in (ANY, layout_number(layout)):
            got = multiply(damaged, known)
            others = np.arange(good.shape[1]) // 16 != warp
            assert_same(got[:, others], good[:, others])
            assert np.isnan(got[:, ~others]).all(), (warp, known)


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_a_short_stage_that_says_it_is_raw(layout: str) -> None:
    """To one of its warps, which is the one to suffer."""
    got = multiply(with_warp_header(layout, 0, 0, 1 << 14), ANY)
    good = multiply(Damaged(PACKED[layout], COLUMNS[layout]), ANY)
    assert np.isnan(got[:, :16]).all()
    assert_same(got[:, 16:], good[:, 16:], layout)


def test_an_expert_that_is_damaged_leaves_the_others_alone() -> None:
    data = packed("trained", (3, 65, 200), "huffman")
    x = tokens(6, 200)
    good = Product([Weight(data, 200)], x, config(8), offsets=[2, 4, 6], float_output=True).check()[0]
    for at in (0, 10, 48):
        damaged = data.copy()
        damaged[1].reshape(-1)[at] ^= 0xFF
        got = Product([Weight(damaged, 200)], x, config(8), offsets=[2, 4, 6], float_output=True).run()[0]
        assert np.isnan(got[2:4]).all() and (np.delete(got, [2, 3], 0) == np.delete(good, [2, 3], 0)).all()
