"""A row's bits depend on nothing but the row and the weight: not on the rows beside it, nor on how many there are, nor
on the order in which warps and copies happen to run."""

from __future__ import annotations

import numpy as np
import pytest
from linear_product import CONFIGS, Product, Weight, assert_same, config, packed, tokens
from native_module import native
from samples import from_float

ROWS, COLUMNS = 200, 1600  # several chains a block, cut between three CTAs
SMALL = [c.tokens for c in CONFIGS if c.tokens <= native.invariant_tokens]


def weight(layout: str) -> Weight:
    name = "any bits" if layout == "raw" else "trained"
    if layout == "raw":
        return Weight(packed("trained", (ROWS, COLUMNS), layout), COLUMNS)
    return Weight(packed(name, (ROWS, COLUMNS), layout), COLUMNS, from_float(np.arange(ROWS) / 64))


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
def test_one_row_and_the_same_row_among_others(layout: str) -> None:
    x, w = tokens(64, COLUMNS), weight(layout)
    (all_rows,) = Product([w], x, config(64), float_output=True).run()
    for size in SMALL:
        for count in (1, size):
            companions = tokens(count, COLUMNS, seed=size)
            companions[-1] = x[5]
            (y,) = Product([w], companions, config(size), float_output=True).run()
            assert_same(y[-1:], all_rows[5:6], f"{count} rows, {size} at once")


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_companions_may_be_anything(layout: str) -> None:
    x, w = tokens(8, COLUMNS), weight(layout)
    (usual,) = Product([w], x, config(8)).run()
    x[:7] = np.random.default_rng(0).integers(0, 1 << 16, (7, COLUMNS), np.uint16)
    (beside_noise,) = Product([w], x, config(8)).run()
    assert_same(beside_noise[7:], usual[7:])


@pytest.mark.parametrize("seeds", [range(1, 4), pytest.param(range(4, 20), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("layout", ["huffman", "nibble"])
@pytest.mark.parametrize("size", [8, 128])
def test_schedules_change_nothing(layout: str, size: int, seeds: range) -> None:
    w, x = weight(layout), tokens(3, COLUMNS)
    (first,) = Product([w], x, config(size), float_output=True, seed=0).check()
    for seed in seeds:
        (again,) = Product([w], x, config(size), float_output=True, seed=seed).run()
        assert_same(again, first, f"seed {seed}")


def test_what_was_in_the_workspace_changes_nothing() -> None:
    """Two calls on one device: the second one's workspace and shared memory hold what the first one left."""
    w, x = weight("huffman"), tokens(3, COLUMNS)
    product = Product([w], x, config(8))
    (first,) = product.run()
    native.linear(product.device, product.call, product.config)
    assert_same(product.read()[0], first)
