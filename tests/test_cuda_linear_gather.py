"""Blocks that several CTAs have parts of: whoever has the last segments adds them up, whatever else happens."""

from __future__ import annotations

import linear_reference as stepped
import numpy as np
import pytest
from cuda_reading import ANY, layout_number
from linear_product import Product, Weight, assert_same, config, packed, tokens
from native_module import native

slow = pytest.mark.slow


def weight(rows: int, columns: int, layout: str = "nibble", experts: int = 0, known: bool = False) -> Weight:
    shape = (experts, rows, columns) if experts else (rows, columns)
    said = layout_number(layout) if known else ANY
    return Weight(packed("trained", shape, layout), columns, layout=said)


@pytest.mark.parametrize("known", [True, False], ids=["nibble", "any"])
@pytest.mark.parametrize("size", [8, 32, 128])
def test_many_chunks_of_one_block(size: int, known: bool) -> None:
    """Kernels of one layout read 4 or 3 pieces at once, those of any layout one. For 128 tokens one cut for all."""
    rows = {8: 2, 32: 2, 128: 65}[size]
    Product([weight(64, 7000, known=known)], tokens(rows, 7000), config(size), multiprocessors=7).check()


@slow
def test_more_chunks_of_a_block_than_a_warp_has_lanes() -> None:
    columns = 34 * 16 * 128
    product = Product([weight(64, columns, "raw")], tokens(1, columns), config(8), multiprocessors=34)
    product.check()
    assert native.cut_linear(product.call, product.config, 34).chunks == 34


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=slow) for seed in range(2, 8))])
def test_chunks_in_any_order(seed: int) -> None:
    product = Product([weight(130, 4100)], tokens(2, 4100), config(8), multiprocessors=4, seed=seed, float_output=True)
    product.check()
    cut = native.cut_linear(product.call, product.config, 4)
    chains = stepped.cut_chains([[stepped.read_weights(product.weights[0].packed)]], [(0, 2)], 8, 3, 4)
    assert cut.chunks > 1 and any(len(parts) > 1 for parts in chains.values())


def test_a_launch_that_is_repeated() -> None:
    """As a graph repeats it: with the same nonce, and what the launch before left in its memory. The first finds the
    nonce of another launch in each flag."""
    product = Product([weight(64, 5000)], tokens(3, 5000), config(8))
    (first,) = product.run()
    device, call = product.device, product.call
    cut = native.cut_linear(call, product.config, product.multiprocessors)
    size = native.flag_bytes(call, product.config, cut)
    partials = device.allocate(native.partial_bytes(call, product.config, cut), "partials")
    plans = [native.plan_linear(call, product.config, cut, partials, 0)[0] for _ in range(2)]
    words, others = (np.frombuffer(plan.argument, np.uint64) for plan in plans)
    assert np.count_nonzero(words != others) == 1, "another nonce"
    before = np.repeat(others[words != others], size // 8)
    flags = device.tensor(before, "flags", readonly=False)
    (plan,) = native.plan_linear(call, product.config, cut, partials, flags)
    for _ in range(2):
        device.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, plan.argument, plan.programmatic)
        assert_same(product.read()[0], first)
        after = device.read(flags, np.uint64, size // 8)
        used = after != before
        assert used.any() and not after[used].any(), "who reads a flag takes it back"


@pytest.mark.parametrize(
    "size, offsets",
    [
        (8, [1, 3, 5, 6]),
        (64, [0, 0, 10, 24]),
        pytest.param(8, [0, 9, 24, 24], marks=slow),
        pytest.param(16, [7, 7, 24, 24], marks=slow),
    ],
)
def test_a_row_s_bits_do_not_depend_on_which_experts_others_hit(size: int, offsets: list[int]) -> None:
    # A CTA that adds up has other blocks to do first: all pieces of all tiles are there by then.
    w, x = weight(200, 2200, experts=4), tokens(24, 2200)
    (alone,) = Product([w], x[:1], config(8), offsets=[0, 0, 1, 1], float_output=True).run()
    (single,) = Product([Weight(w.matrix(2), 2200)], x[:1], config(8), float_output=True).run()
    assert_same(alone, single)
    mixed = tokens(offsets[-1], 2200, seed=size)
    row = offsets[2] - 1
    mixed[row] = x[0]
    (y,) = Product([w], mixed, config(size), offsets=offsets, float_output=True, multiprocessors=3).run()
    assert_same(y[row : row + 1], alone)
