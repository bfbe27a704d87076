"""torch.ops.unweight: values, shapes, gradients, errors, and what compilers need."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from capability import CAPABILITIES, capability
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import CONTENTS, LAYOUTS, SHAPES, assert_same_bits, keep_for_the_sanitizers, weight
from test_packed import changed, pack
from torch.autograd import forward_ad
from torch.library import opcheck

import unweight_ext as u
from unweight_ext.packed import info, pad_row_bytes

linear = torch.ops.unweight.linear
DTYPES = (torch.bfloat16, torch.float32)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, for outputs without NaN."""
    return a.dtype == b.dtype and torch.equal(a, b)


# --------------------------------------------------------------------------------------------------------------- values


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


# --------------------------------------------------------------------------------------------------------------- shapes


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
def test_embedding_gives_rows_bit_for_bit(layout, level):
    for content in CONTENTS:
        for shape in SHAPES:
            w = weight(content, *shape)
            packed = pack(w, layout)
            with capability(level):
                every = torch.arange(shape[0])
                assert_same_bits(torch.ops.unweight.embedding(every.flip(0), packed, shape[1]), w.flip(0))
                some = torch.tensor([[0, shape[0] - 1, 0], [shape[0] // 2, 0, 0]])
                assert_same_bits(torch.ops.unweight.embedding(some, packed, shape[1]), w[some])


def test_embedding_ids():
    w = weight("trained", 70, 130)
    packed = pack(w, "nibble")
    ids = torch.tensor([3, 69, 3])
    for same_ids in (ids.int(), torch.stack([ids, ids], 1)[:, 0]):
        assert_same_bits(torch.ops.unweight.embedding(same_ids, packed, 130), w[ids])
    assert_same_bits(torch.ops.unweight.embedding(ids[0], packed, 130), w[3])
    assert torch.ops.unweight.embedding(ids[:0].view(0, 4), packed, 130).shape == (0, 4, 130)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpack(layout):
    w = torch.stack([weight("few outsiders", 65, 129, seed=e) for e in range(2)])
    one, stacked = pack(w[0], layout), pack(w, layout, stacked=True)
    assert_same_bits(torch.ops.unweight.unpack(one, 129, torch.bfloat16), w[0])
    assert_same_bits(torch.ops.unweight.unpack(stacked, 129, torch.bfloat16), w)
    for threads in (0, 1, 2):
        assert_same_bits(torch.ops.unweight._unpack(stacked, 129, threads), w)


# ----------------------------------------------------------------------------------- gradients, fake tensors, compiling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_gradients_are_those_of_f_linear(dtype, lead, exact):
    w = weight("trained", 65, 129)
    packed = pack(w, "nibble")
    x, bias = tokens(*lead, 129, dtype=dtype), tokens(65, dtype=dtype, seed=2)
    go = tokens(*lead, 65, dtype=dtype, seed=3)
    wanted = x.clone().requires_grad_(), bias.clone().requires_grad_()
    F.linear(wanted[0], w.to(dtype), wanted[1]).backward(go)
    x.requires_grad_()
    bias.requires_grad_()
    linear(x, packed, bias, exact=exact).backward(go)
    torch.testing.assert_close(x.grad, wanted[0].grad)
    torch.testing.assert_close(bias.grad, wanted[1].grad)
    x.grad = None
    linear(x, packed, exact=exact).backward(go)
    torch.testing.assert_close(x.grad, wanted[0].grad)


def test_gradient_of_the_bias_alone_and_of_nothing():
    packed, bias = pack(weight("trained", 65, 129), "huffman"), torch.zeros(65, requires_grad=True)
    linear(tokens(4, 129, dtype=torch.float32), packed, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((65,), 4.0))
    assert not linear(tokens(4, 129), packed).requires_grad
    with torch.no_grad():
        assert not linear(tokens(4, 129).requires_grad_(), packed).requires_grad
    with torch.inference_mode():
        assert linear(tokens(4, 129), packed).is_inference()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_forward_mode_is_that_of_f_linear(dtype, exact):
    w = weight("trained", 65, 129)
    packed = pack(w, "nibble")
    x, bias = tokens(2, 3, 129, dtype=dtype), tokens(65, dtype=dtype, seed=2)
    tangents = tokens(2, 3, 129, dtype=dtype, seed=3), tokens(65, dtype=dtype, seed=4)
    for ours, plain, primals in (
        (lambda x, b: linear(x, packed, b, exact=exact), lambda x, b: F.linear(x, w.to(dtype), b), (x, bias)),
        (lambda x: linear(x, packed, bias, exact=exact), lambda x: F.linear(x, w.to(dtype), bias), (x,)),
        (lambda b: linear(x, packed, b, exact=exact), lambda b: F.linear(x, w.to(dtype), b), (bias,)),
    ):
        own = tangents[1:] if primals[0] is bias else tangents[: len(primals)]
        # F.linear rounds the product before it adds the bias' tangent.
        got, expected = torch.func.jvp(ours, primals, own), torch.func.jvp(plain, primals, own)
        torch.testing.assert_close(got, expected, atol=0.005 if dtype == torch.bfloat16 else 1e-5, rtol=0.016)
    if dtype == torch.float32:
        forward = torch.func.jacfwd(lambda x: linear(x, packed, exact=exact))(x[0, 0])
        torch.testing.assert_close(forward, w.float())


def test_forward_mode_over_gradients():
    w = weight("trained", 65, 129)
    packed, x, t = pack(w, "nibble"), tokens(129, dtype=torch.float32), tokens(129, dtype=torch.float32, seed=2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), t)
        (grad,) = torch.autograd.grad(linear(dual, packed).square().sum(), dual, create_graph=True)
        torch.testing.assert_close(forward_ad.unpack_dual(grad).tangent, 2 * w.float().T @ (w.float() @ t))


def test_transforms_of_torch_func_are_right_or_refused():
    packed, x, bias = pack(weight("trained", 65, 129), "nibble"), tokens(4, 3, 129), tokens(4, 65, seed=2)
    y = torch.stack([linear(*each) for each in zip(x, [packed] * 4, bias, strict=True)])
    assert same(torch.func.vmap(linear, (0, None, 0))(x, packed, bias), y)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # as with every operator of torch.library
        torch.func.grad(lambda x: linear(x, packed).sum())(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("exact", [False, True], ids=["fused", "exact"])
def test_opcheck_linear(layout, grad, exact):
    packed = pack(weight("trained", 65, 129), layout)
    for x, bias in ((tokens(2, 3, 129), tokens(65)), (tokens(129, dtype=torch.float32), None), (tokens(0, 129), None)):
        bias = () if bias is None else (bias.requires_grad_(grad),)
        opcheck(linear.default, (x.requires_grad_(grad), packed, *bias), {"exact": exact})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_the_others(layout):
    w = weight("trained", 65, 129)
    packed, stacked = pack(w, layout), pack(torch.stack([w, w]), layout, stacked=True)
    opcheck(torch.ops.unweight.embedding.default, (torch.tensor([[1, 64], [0, 2]]), packed, 129))
    for p in (packed, stacked):
        opcheck(torch.ops.unweight.unpack.default, (p, 129, torch.bfloat16))
        opcheck(torch.ops.unweight._unpack.default, (p, 129, 0))
        opcheck(torch.ops.unweight._transcode.default, (p, 1, 0))
        opcheck(torch.ops.unweight._describe.default, (p,))
        opcheck(torch.ops.unweight._resize.default, (p, p.shape[-1] + 128))
        opcheck(torch.ops.unweight._verify.default, (p,))
    opcheck(torch.ops.unweight._pack.default, (w, LAYOUTS.index(layout), [65, 129], 0))


def test_meta_tensors_have_the_shapes_of_real_ones():
    packed = pack(weight("trained", 65, 129), "nibble").to("meta")
    assert linear(tokens(2, 3, 129).to("meta"), packed).shape == (2, 3, 65)
    assert torch.ops.unweight.unpack(packed, 129, torch.bfloat16).shape == (65, 129)
    assert torch.ops.unweight.embedding(torch.zeros(2, 3, dtype=torch.long, device="meta"), packed, 129).shape == (
        2,
        3,
        129,
    )


def test_captured_without_a_graph_break():
    packed, bias = pack(weight("trained", 65, 129), "nibble"), tokens(65)

    def block(x: torch.Tensor) -> torch.Tensor:
        return linear(x.relu(), packed, bias).sum(-1)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 5, 64):
        x = tokens(m, 129).requires_grad_()
        torch.testing.assert_close(compiled(x), block(x))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(block(x).sum(), x))


# --------------------------------------------------------------------------------------------------------------- errors

W = weight("trained", 64, 128)
PACKED = pack(W, "nibble")
X = tokens(2, 128)
IDS = torch.tensor([1, 2])
ops = torch.ops.unweight


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: linear(X.half(), PACKED), "x: dtype torch.float16, expected torch.bfloat16 or torch.float32"),
        (lambda: linear(X.double(), PACKED), "x: dtype torch.float64"),
        (lambda: linear(X[:, :100], PACKED), "x: .*100.*, expected 128"),
        (lambda: linear(X[0, 0], PACKED), "x: "),
        (lambda: linear(X, PACKED[None]), r"packed_w: shape \[1, 64, \d+\], expected \[out_features, row_bytes\]"),
        (lambda: linear(X, PACKED.view(torch.int8)), "packed_w: dtype torch.int8, expected torch.uint8"),
        (lambda: linear(X, W), "packed_w: dtype torch.bfloat16, expected torch.uint8"),
        (lambda: linear(X, PACKED.view(32, -1)), "packed_w: its shape says 32 out_features, its header 64"),
        (lambda: linear(X, PACKED[:32].contiguous()), "packed"),
        (lambda: linear(X, torch.zeros_like(PACKED)), "packed: not a packed weight"),
        (lambda: linear(X, changed(PACKED, 8, 3)), "packed: format version 3, this build reads version 1"),
        (lambda: linear(X, PACKED, tokens(63)), "bias: .*63.*, expected .*64"),
        (lambda: linear(X, PACKED, tokens(64).half()), "bias: dtype torch.float16"),
        (lambda: linear(X.to("meta"), PACKED), "x: device meta, expected that of packed_w, cpu"),
        (lambda: linear(X, PACKED.to("meta")), "x: device cpu, expected that of packed_w, meta"),
        (lambda: linear(X, PACKED, tokens(64).to("meta")), "bias: device meta, expected that of packed_w, cpu"),
        (lambda: ops.embedding(IDS.to("meta"), PACKED, 128), "ids: device meta, expected that of packed_w, cpu"),
        (lambda: linear(X, PACKED, layout=1), "layout: "),
        (lambda: linear(X, PACKED, layout=9), "layout: 9"),
        (lambda: ops.unpack(PACKED, 127, torch.bfloat16), "in_features: 127, expected 128"),
        (lambda: ops.unpack(PACKED, 128, torch.float32), "dtype: torch.float32, expected torch.bfloat16"),
        (lambda: ops.embedding(torch.tensor([1, 64]), PACKED, 128), "ids: .*64"),
        (lambda: ops.embedding(torch.tensor([-1]), PACKED, 128), "ids: .*-1"),
        (lambda: ops.embedding(IDS.float(), PACKED, 128), "ids: dtype torch.float32"),
        (lambda: ops.embedding(IDS, PACKED, 64), "embedding_dim: 64, expected 128"),
        (lambda: ops._pack(W, 7, [64, 128], 0), "layout: 7, expected 0"),
        (lambda: ops._pack(W, 2, [64, 64], 0), "shape: "),
        (lambda: ops._transcode(PACKED, 7, 0), "layout: 7, expected 0"),
        (lambda: ops._unpack(PACKED, 128, -1), "threads: -1, expected 0"),
        (lambda: ops._cpu_capability(5), "level: 5"),
    ],
)
def test_errors_name_the_argument_what_it_got_and_what_is_allowed(call, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call()


damages = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(damage=damages, head=st.booleans(), m=st.sampled_from([1, 9, 64]))
def test_linear_and_embedding_survive_any_bytes(layout, level, damage, head, m):
    packed = pack(weight("few outsiders", 70, 260), layout)
    flat = packed.view(-1)
    for where, value in damage:
        flat[int(where * (1024 if head else flat.numel()))] = value
    keep_for_the_sanitizers(packed)
    with capability(level):
        for call in (
            lambda: linear(tokens(m, 260), packed),
            lambda: ops.embedding(torch.arange(m), packed, 260),
        ):
            try:
                assert call().shape[0] == m
            except RuntimeError as error:
                assert str(error).startswith(("packed", "x: ", "embedding_dim"))


@pytest.mark.parametrize("exact", [False, True])
def test_autocast_does_what_it_does_to_f_linear(exact):
    w, x, bias = weight("trained", 70, 300), torch.randn(3, 300), torch.randn(70)
    packed = u.pack(w)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ops.unweight.linear(x, packed, bias, exact=exact)

    y = run(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, w, bias)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=0.02, rtol=0.02)
    assert not exact or torch.equal(y, expected)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), y)
    x.requires_grad_()
    run(x).float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_cuda_tensors_get_a_message_of_ours_not_the_dispatcher_s():
    for name in ("linear", "unpack", "embedding", "_pack", "_unpack", "_transcode", "_resize", "_verify", "_describe"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"unweight::{name}", "CUDA")


@pytest.mark.parametrize("m", [257, 513])
def test_rows_do_not_depend_on_how_the_tokens_are_cut(m):
    x = torch.randn(m, 300, dtype=torch.bfloat16)
    packed = u.pack(weight("trained", 70, 300))
    y = torch.ops.unweight.linear(x, packed)
    for i in (0, 128, 255, 256, m - 1):
        assert torch.equal(torch.ops.unweight.linear(x[i : i + 1], packed)[0], y[i])
