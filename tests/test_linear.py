"""torch.ops.unweight.linear on the CPU: values, companions, shapes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from capability import CAPABILITIES, capability
from products import DTYPES, same, tokens
from samples import LAYOUTS, SHAPES, weight
from test_packed import pack

import unweight_ext as u
from unweight_ext.packed import info, pad_row_bytes

linear = torch.ops.unweight.linear


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 3, 4, 5, 8, 16, 17, 64, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_as_accurate_as_f_linear(layout, level, m, dtype):
    for shape in SHAPES:
        w = weight("few outsiders" if m % 2 else "trained", *shape)
        w[~w.isfinite() | (w.abs() > 1e3)] = 3.0  # their own test is below
        x, bias = tokens(m, shape[1], dtype=dtype), tokens(shape[0], dtype=dtype, seed=2)
        exact = x.double() @ w.double().T + bias.double()
        plain = F.linear(x, w.to(dtype), bias)
        with capability(level):
            y = linear(x, pack(w, layout), bias)
        assert y.dtype == dtype and y.shape == plain.shape
        # Of one output the error is a matter of luck: a rounding of the largest result is always allowed. F.linear sums
        # FP32 in blocks, which depend on the shape; in a fixed order errors are up to 3 times those.
        factor = 2 if dtype == torch.bfloat16 else 4
        allowed = torch.finfo(dtype).eps / 2 * exact.abs().max() + factor * (plain - exact).abs().max()
        assert (y - exact).abs().max() <= allowed, shape


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 9, 70])
def test_infinities_and_nans_come_out_where_they_should(layout, level, m):
    for shape in ((65, 129), (70, 300)):
        w, x = weight("few outsiders", *shape), tokens(m, shape[1])
        x[0, -1], x[-1, 0] = torch.inf, torch.nan
        w[3, -1], w[4, -1], w[-1, 5] = 0.0, -0.0, -torch.inf
        expected = x.double() @ w.double().T
        with capability(level):
            y = linear(x, pack(w, layout))
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf() & (y > 0), expected.isinf() & (expected > 0))


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_companions(layout, level, dtype):
    for shape in ((65, 129), (130, 1100), (64, 4224)):
        packed, x = (
            pack(weight("few outsiders", *shape).nan_to_num(0, 1, 1), layout),
            tokens(150, shape[1], dtype=dtype),
        )
        bias = tokens(shape[0], dtype=dtype, seed=2)
        with capability(level):
            alone = torch.cat([linear(row, packed, bias) for row in x.split(1)])
            for m in (2, 4, 5, 7, 8, 16, 33, 64, 128, 150):
                assert same(linear(x[:m], packed, bias), alone[:m]), (shape, m)
            order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
            assert same(linear(x[order], packed, bias), alone[order])
            assert same(linear(torch.cat([x[:1], 1e20 * x[1:64]]), packed, bias)[:1], alone[:1])


@pytest.mark.parametrize("m", [257, 513])
def test_rows_do_not_depend_on_how_the_tokens_are_cut(m):
    x = torch.randn(m, 300, dtype=torch.bfloat16)
    packed = u.pack(weight("trained", 70, 300))
    y = torch.ops.unweight.linear(x, packed)
    for i in (0, 128, 255, 256, m - 1):
        assert torch.equal(torch.ops.unweight.linear(x[i : i + 1], packed)[0], y[i])


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_layout(level, dtype):
    w, x = weight("trained", 130, 1100), tokens(70, 1100, dtype=dtype)
    with capability(level):
        for m in (1, 6, 70):
            y = [linear(x[:m], pack(w, layout)) for layout in LAYOUTS]
            assert all(same(y[0], other) for other in y[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_do_not_matter(layout):
    packed, x = pack(weight("trained", 200, 1100), layout), tokens(20, 1100)
    threads = torch.get_num_threads()
    many = linear(x, packed), linear(x[:1], packed)
    try:
        torch.set_num_threads(1)
        assert same(linear(x, packed), many[0]) and same(linear(x[:1], packed), many[1])
    finally:
        torch.set_num_threads(threads)


def test_callers_on_several_threads():
    packed = {layout: pack(weight("trained", 130, 600), layout) for layout in LAYOUTS}
    x = tokens(9, 600)
    expected = {layout: (linear(x, p), linear(x[:1], p)) for layout, p in packed.items()}

    def call(layout: str) -> bool:
        y = linear(x, packed[layout]), linear(x[:1], packed[layout])
        return all(map(same, y, expected[layout]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, LAYOUTS * 25))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_is_f_linear(layout, dtype):
    for shape in ((1, 1), (65, 129), (200, 384)):
        w, bias = weight("few outsiders", *shape).nan_to_num(0, 1, 1), tokens(shape[0], dtype=dtype, seed=2)
        packed = pack(w, layout)
        for lead in ((), (1,), (7,), (64,), (2, 3), (0,), (2, 0)):
            x = tokens(*lead, shape[1], dtype=dtype)
            for b in (None, bias):
                assert same(linear(x, packed, b, exact=True), F.linear(x, w.to(dtype), b)), (shape, lead)
        strided = tokens(shape[1], 12, dtype=dtype).t()
        assert same(linear(strided, packed, exact=True), F.linear(strided, w.to(dtype)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_and_strides(layout, dtype):
    packed = pack(weight("trained", 65, 130), layout)
    flat = tokens(24, 130, dtype=dtype)
    y = linear(flat, packed)
    assert same(linear(flat[0], packed), y[0])
    assert same(linear(flat.view(2, 3, 4, 130), packed), y.view(2, 3, 4, 65))
    assert same(linear(flat.t().contiguous().t(), packed), y)
    assert same(linear(flat[::3], packed), y[::3])
    assert same(linear(torch.cat([flat, flat], 1)[:, :130], packed), y)
    assert same(linear(flat[:1].expand(5, 130), packed), y[:1].expand(5, 65))
    assert same(linear(flat.view(4, 6, 130).transpose(0, 1), packed), y.view(4, 6, 65).transpose(0, 1))
    for lead in ((0,), (3, 0), (0, 5)):
        empty = linear(flat.new_empty(*lead, 130), packed)
        assert empty.shape == (*lead, 65) and empty.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_the_layout_argument_do_not_matter(layout):
    packed, x = pack(weight("trained", 65, 130), layout), tokens(5, 130)
    y = linear(x, packed)
    assert same(linear(x, pad_row_bytes(packed, packed.shape[1] + 51)), y)
    assert same(linear(x, packed, layout=LAYOUTS.index(info(packed).layout)), y)
    assert same(linear(x, packed[None].expand(2, -1, -1).contiguous()[1]), y)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_bf16_as_they_are(layout, level):
    w, x, bias = weight("trained", 65, 300), tokens(20, 300), tokens(65, seed=2)
    packed = pack(w, layout)
    expected = x.double() @ w.double().T + bias.double()
    with capability(level):
        y = linear(x, packed, bias, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert (y - expected).abs().max() < 1e-5 * expected.abs().max()  # BF16 has 4e-3
        # Rounding them gives what rounds them, or its neighbour where the order of a sum decides.
        rounded = linear(x, packed, bias)
        torch.testing.assert_close(y.bfloat16(), rounded, atol=0, rtol=2**-7)
        assert (y.bfloat16() == rounded).float().mean() > 0.99
    for dtype in DTYPES:
        assert same(linear(x.to(dtype), packed, out_dtype=dtype), linear(x.to(dtype), packed))
    exact = linear(x, packed, bias, exact=True, out_dtype=torch.float32)
    assert same(exact, F.linear(x.float(), w.float(), bias.float()))
