"""Several weights in one launch, and stacks of experts with the rows of x that are theirs."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_reading import ANY, layout_number
from linear_product import Product, Weight, assert_same, config, packed, tokens
from samples import from_float

LAYOUTS = ("raw", "huffman", "nibble")
slow = pytest.mark.slow


def weight(rows: int, columns: int, layout: str, seed: int = 0, *, known: bool = False, **options) -> Weight:
    number = layout_number(layout) if known else ANY
    bias = from_float(np.random.default_rng(seed).standard_normal(rows))
    return Weight(packed("trained", (rows, columns), layout, seed), columns, bias, number, **options)


def stack(experts: int, rows: int, columns: int, layout: str, *, known: bool = False) -> Weight:
    number = layout_number(layout) if known else ANY
    bias = from_float(np.random.default_rng(9).standard_normal((experts, rows)))
    return Weight(packed("trained", (experts, rows, columns), layout), columns, bias, number)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slow) for seed in (1, 2))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_one_layout(layout: str, seed: int) -> None:
    """As q, k, v: of different sizes, each with its own bias and output. In huffman each has its own code."""
    weights = [weight(rows, 300, layout, number, known=True) for number, rows in enumerate((130, 64, 1 + 64))]
    Product(weights, tokens(3, 300), config(8), seed=seed, multiprocessors=4).check()


@pytest.mark.parametrize("multiprocessors", [1, 3])
def test_weights_of_every_layout(multiprocessors: int) -> None:
    weights = [weight(70 + 64 * i, 300, layout, i, gap=i) for i, layout in enumerate(LAYOUTS)]
    weights.append(weight(16, 300, "huffman", 7))
    Product(weights, tokens(9, 300), config(8), multiprocessors=multiprocessors).check()


def test_weights_one_by_one_give_the_same_rows_of_sums() -> None:
    """One CTA has whole blocks, whatever stands beside them."""
    weights = [weight(70, 300, "huffman", i) for i in range(2)]
    x = tokens(3, 300)
    together = Product(weights, x, config(8), multiprocessors=1).check()
    for y, one in zip(together, weights, strict=True):
        assert_same(y, Product([one], x, config(8), multiprocessors=1).run()[0])


OFFSETS = {
    "all in one": [0, 0, 6, 6],
    "the last": [0, 0, 0, 6],
    "each": [1, 2, 4, 6],
    "some rows are nobody's": [1, 1, 3, 4],
    "none": [0, 0, 0, 0],
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(layout: str, name: str) -> None:
    """Rows behind the last expert's end are nobody's, and become zeros."""
    product = Product([stack(4, 70, 300, layout, known=True)], tokens(6, 300), config(8), offsets=OFFSETS[name])
    product.check()


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_experts_with_several_tiles_of_tokens(layout: str) -> None:
    product = Product([stack(3, 130, 200, layout)], tokens(30, 200), config(8), offsets=[17, 17, 30], seed=3)
    product.check()


def test_two_stacks() -> None:
    """As gate and up of all experts."""
    stacks = [stack(3, 70, 300, "huffman"), stack(3, 65, 300, "nibble")]
    Product(stacks, tokens(7, 300), config(8), offsets=[2, 2, 7], multiprocessors=4).check()


@pytest.mark.parametrize("offsets", [[9, 2, 100, 6], [-5, 3, 2, 6], [2**31 - 1, -(2**31), 0, 5], [6, 5, 4, 3]], ids=str)
def test_offsets_that_make_no_sense(offsets: list[int]) -> None:
    """Nothing outside x and y is touched; a row belongs to the expert that the clamped offsets give it."""
    Product([stack(4, 65, 200, "huffman")], tokens(6, 200), config(8), offsets=offsets).check()


@pytest.mark.parametrize("float_output", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("columns", [1, 37, 64])
def test_rows_of_no_expert_are_zeros(columns: int, float_output: bool) -> None:
    """Also of many experts, at odd places, of two stacks; what lies between rows stays as it was."""
    experts, ends = 40, [0] * 11 + [2] * 29
    ends[20] = 3  # the largest isn't the last
    stacks = [
        Weight(packed("trained", (experts, rows, columns), "nibble"), columns, gap=gap)
        for rows, gap in ((65, 3), (7, 0))
    ]
    product = Product(stacks, tokens(9, columns), config(8), ends, float_output=float_output, multiprocessors=2)
    for y in product.check():
        assert y[2].any() and not y[3:].any()


@pytest.mark.parametrize("size", [32, 128, pytest.param(256, marks=slow)])
def test_large_tiles_of_experts(size: int) -> None:
    Product([stack(3, 65, 200, "nibble")], tokens(40, 200), config(size), offsets=[33, 33, 40]).check()
