"""Blocks that several CTAs have parts of: whoever has the last segments adds them up, whatever else happens."""

from __future__ import annotations

import linear_reference as stepped
import numpy as np
import pytest
from linear_product import Product, Weight, assert_same, config, packed, tokens
from native_module import native

slow = pytest.mark.slow


def weight(rows: int, columns: int, layout: str = "nibble", experts: int = 0) -> Weight:
    shape = (experts, rows, columns) if experts else (rows, columns)
    return Weight(packed("trained", shape, layout), columns)


@pytest.mark.parametrize("size", [8, 128])
def test_many_chunks_of_one_block(size: int) -> None:
    """For 128 tokens one cut for all."""
    rows = 2 if size == 8 else 65
    Product([weight(64, 7000)], tokens(rows, 7000), config(size), multiprocessors=5).check()


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


def test_a_row_s_bits_do_not_depend_on_which_experts_others_hit() -> None:
    w, x = weight(70, 2200, experts=4), tokens(24, 2200)
    (alone,) = Product([w], x[:1], config(8), offsets=[0, 0, 1, 1], float_output=True).run()
    (single,) = Product([Weight(w.matrix(2), 2200)], x[:1], config(8), float_output=True).run()
    assert_same(alone, single)
    for size, offsets in ((8, [1, 3, 5, 6]), (8, [0, 9, 24, 24]), (16, [7, 7, 24, 24]), (64, [0, 0, 10, 24])):
        mixed = tokens(offsets[-1], 2200, seed=size)
        row = offsets[2] - 1
        mixed[row] = x[0]
        (y,) = Product([w], mixed, config(size), offsets=offsets, float_output=True, multiprocessors=3).run()
        assert_same(y[row : row + 1], alone, f"{size} at once, experts end at {offsets}")
