"""torch.ops.unweight.grouped_linear and linear_many on the CPU."""

import pytest
import torch
from products import DTYPES, same, tokens
from samples import LAYOUTS, weight
from test_packed import pack

from unweight_ext import ops

linear, grouped_linear, linear_many = (
    getattr(torch.ops.unweight, n) for n in ("linear", "grouped_linear", "linear_many")
)
EXPERTS, N, K = 4, 65, 129
WEIGHTS = torch.stack([weight("trained", N, K, seed) for seed in range(EXPERTS)])


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


# An expert in the middle without rows, one with all, none with any, rows behind the last one's.
ENDS = ((2, 2, 5, 9), (0, 9, 9, 9), (0, 0, 0, 0), (1, 3, 4, 6))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_each_expert_multiplies_its_rows(layout, dtype, exact, out_dtype):
    packed = pack(WEIGHTS, layout, stacked=True)
    x, bias = tokens(9, K, dtype=dtype), tokens(EXPERTS, N, dtype=dtype, seed=2)
    options = {"exact": exact, "out_dtype": out_dtype, "layout": LAYOUTS.index(layout)}
    for ends in ENDS:
        for b in (None, bias):
            y = grouped_linear(x, packed, offsets(*ends), b, **options)
            expected = torch.zeros(9, N, dtype=out_dtype or dtype)
            for e, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                if begin < end:
                    one = None if b is None else b[e]
                    expected[begin:end] = linear(x[begin:end], packed[e], one, exact=exact, out_dtype=out_dtype)
            assert same(y, expected), ends


def test_strides_and_empty_sizes():
    packed, x, ends = pack(WEIGHTS, "nibble", stacked=True), tokens(9, K), offsets(2, 2, 5, 9)
    y = grouped_linear(x, packed, ends)
    assert same(grouped_linear(x.t().contiguous().t(), packed, ends), y)
    assert same(grouped_linear(torch.cat([x, x], 1)[:, :K], packed, ends), y)
    assert same(grouped_linear(x, packed, torch.stack([ends, ends], 1)[:, 0]), y)
    assert grouped_linear(x[:0], packed, offsets(0, 0, 0, 0)).shape == (0, N)
    assert same(grouped_linear(x, packed[:0], offsets()), torch.zeros_like(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_many_weights_give_what_each_gives(dtype, out_dtype):
    shapes, layouts = (65, 1, 200, 64, 64, 7), ("nibble", "raw", "huffman", "archive", "nibble", "huffman")
    packed = [pack(weight("trained", n, K, n), layout) for n, layout in zip(shapes, layouts, strict=True)]
    x = tokens(2, 3, K, dtype=dtype)
    bias = [None if n == 64 else tokens(n, dtype=dtype, seed=2) for n in shapes]
    known = [ops.LAYOUTS.index(layout) for layout in layouts]
    for numbers in ([], known, [-1] * len(known)):
        ys = linear_many(x, packed, bias, layouts=numbers, out_dtype=out_dtype)
        assert len(ys) == len(packed)
        for y, w, b in zip(ys, packed, bias, strict=True):
            assert same(y, linear(x, w, b, out_dtype=out_dtype))
    assert linear_many(x, [], []) == []


G = pack(WEIGHTS, "nibble", stacked=True)
X = tokens(9, K)
OFFS = offsets(2, 2, 5, 9)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: grouped_linear(X, G[0], OFFS), r"packed_w: 2 dimensions, expected 3"),
        (lambda: grouped_linear(X[None], G, OFFS), r"x: 3 dimensions, expected 2, \[rows, in_features\]"),
        (lambda: grouped_linear(X, G, OFFS.long()), "offs: dtype torch.int64, expected torch.int32"),
        (lambda: grouped_linear(X, G, OFFS[:3]), r"offs: shape \[3\], expected \[4\], an end for each matrix"),
        (lambda: grouped_linear(X, G, OFFS[None]), r"offs: shape \[1, 4\], expected \[4\]"),
        (lambda: grouped_linear(X, G, offsets(2, 1, 5, 9)), "offs: element 1 is 1, expected 2 to 9"),
        (lambda: grouped_linear(X, G, offsets(-1, 1, 5, 9)), "offs: element 0 is -1, expected 0 to 9"),
        (lambda: grouped_linear(X, G, offsets(2, 2, 5, 10)), "offs: element 3 is 10, expected 5 to 9"),
        (lambda: grouped_linear(X, G, offsets(2, 2, 5, 10), exact=True), "offs: element 3 is 10, expected 5 to 9"),
        (lambda: grouped_linear(X, G, OFFS, X[0]), r"bias: shape \[129\], expected \[4, 65\]"),
        (lambda: grouped_linear(X, G, OFFS, layout=1), r"layout: 1 \(huffman\), expected -1 or that of packed_w, 2"),
        (lambda: grouped_linear(X.half(), G, OFFS), "x: dtype torch.float16, expected torch.bfloat16 or torch.float32"),
        (lambda: grouped_linear(X[:, :100], G, OFFS), r"x: in_features \(its last dimension\): 100, expected 129"),
        (lambda: grouped_linear(X, G, OFFS, out_dtype=torch.half), "out_dtype: torch.float16, expected None, torch.fl"),
        (lambda: grouped_linear(X, G, OFFS.to("meta")), "offs: device meta, expected that of packed_w, cpu"),
        (lambda: linear_many(X, [G[0]], []), "bias: 0 of them, expected 1, one .or None. for each packed_w"),
        (lambda: linear_many(X, [G[0], G[1]], [None, None], layouts=[2]), "layouts: 1 of them, expected 2, one for"),
        (lambda: linear_many(X, [G[0], G], [None, None]), r"packed_w: shape .* \(weight 1 of the list\)"),
        (lambda: linear_many(X, [G[0], X], [None, None]), r"packed_w: dtype torch.bfloat16.*\(weight 1 of the list\)"),
        (lambda: linear_many(X, [G[0], G[1]], [None, None], layouts=[2, 0]), r"layout: 0 .*\(weight 1 of the list\)"),
        (lambda: linear_many(X, [G[0]], [X[0]]), r"bias: shape \[129\], expected \[65\] \(weight 0 of the list\)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call()
