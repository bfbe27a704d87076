"""Gradients, forward mode, transforms and autocast of the products."""

import pytest
import torch
import torch.nn.functional as F
from products import DTYPES, same, tokens
from samples import weight
from test_packed import pack
from torch.autograd import forward_ad

import unweight_ext as u

linear = torch.ops.unweight.linear


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


# ------------------------------------------------------------------------------------------ experts and several weights

EXPERTS = torch.stack([weight("trained", 65, 129, seed) for seed in range(4)])
ENDS = (2, 2, 5, 8)  # of 9 rows


def plain_grouped(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    parts = [F.linear(x[b:e], w[i], bias[i]) for i, (b, e) in enumerate(zip((0, *ENDS), ENDS, strict=False))]
    return torch.cat([*parts, torch.zeros(9 - ENDS[-1], 65, dtype=x.dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_experts(dtype, exact):
    packed, offs = u.pack(EXPERTS, "huffman", stacked=True), torch.tensor(ENDS, dtype=torch.int32)
    x, bias, go = tokens(9, 129, dtype=dtype), tokens(4, 65, dtype=dtype, seed=2), tokens(9, 65, dtype=dtype, seed=3)
    wanted = x.clone().requires_grad_(), bias.clone().requires_grad_()
    plain_grouped(wanted[0], EXPERTS.to(dtype), wanted[1]).backward(go)
    x.requires_grad_()
    bias.requires_grad_()
    torch.ops.unweight.grouped_linear(x, packed, offs, bias, exact=exact).backward(go)
    torch.testing.assert_close((x.grad, bias.grad), (wanted[0].grad, wanted[1].grad))
    x.grad = None
    y = torch.ops.unweight.grouped_linear(x, packed, offs, out_dtype=torch.float32)
    y.backward(go.float())
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, wanted[0].grad, atol=0.02 if dtype == torch.bfloat16 else 1e-5, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_mode_of_experts(dtype):
    packed, offs = u.pack(EXPERTS, "huffman", stacked=True), torch.tensor(ENDS, dtype=torch.int32)
    x, bias = tokens(9, 129, dtype=dtype), tokens(4, 65, dtype=dtype, seed=2)
    tangents = tokens(9, 129, dtype=dtype, seed=3), tokens(4, 65, dtype=dtype, seed=4)
    grouped = torch.ops.unweight.grouped_linear
    for ours, plain, which in (
        (lambda x, b: grouped(x, packed, offs, b), lambda x, b: plain_grouped(x, EXPERTS.to(dtype), b), slice(0, 2)),
        (lambda x: grouped(x, packed, offs, bias), lambda x: plain_grouped(x, EXPERTS.to(dtype), bias), slice(0, 1)),
        (lambda b: grouped(x, packed, offs, b), lambda b: plain_grouped(x, EXPERTS.to(dtype), b), slice(1, 2)),
    ):
        primals, own = (x, bias)[which], tangents[which]
        got, expected = torch.func.jvp(ours, primals, own), torch.func.jvp(plain, primals, own)
        torch.testing.assert_close(got, expected, atol=0.005 if dtype == torch.bfloat16 else 1e-5, rtol=0.016)


def test_derivatives_of_several_weights_are_those_of_each():
    packed, x = [u.pack(w) for w in EXPERTS[:3]], tokens(5, 129, dtype=torch.float32)
    bias, t = tokens(65, dtype=torch.float32, seed=2), tokens(5, 129, dtype=torch.float32, seed=3)

    def ours(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return torch.ops.unweight.linear_many(x, packed, [None, b, b])

    def each(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [linear(x, w, c) for w, c in zip(packed, (None, b, b), strict=True)]

    for wanted in ((True, True), (True, False), (False, True)):
        leaves = [v.clone().requires_grad_(r) for v, r in zip((x, bias), wanted, strict=True)]
        others = [v.clone().requires_grad_(r) for v, r in zip((x, bias), wanted, strict=True)]
        sum(y.square().sum() for y in ours(*leaves)).backward()
        sum(y.square().sum() for y in each(*others)).backward()
        assert all(a.grad is b.grad is None or same(a.grad, b.grad) for a, b in zip(leaves, others, strict=True))
    got, expected = torch.func.jvp(ours, (x, bias), (t, bias)), torch.func.jvp(each, (x, bias), (t, bias))
    torch.testing.assert_close(got, expected)
    assert all(not y.requires_grad for y in ours(x, bias))


def test_autocast_of_experts_and_several_weights():
    packed, x, bias = u.pack(EXPERTS, stacked=True), torch.randn(9, 129), torch.randn(4, 65)
    offs = torch.tensor(ENDS, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ops.unweight.grouped_linear(x, packed, offs, bias)
        ys = torch.ops.unweight.linear_many(x, list(packed), [None, *bias[1:]])
    assert same(y, torch.ops.unweight.grouped_linear(x.bfloat16(), packed, offs, bias.bfloat16()))
    for e, one in enumerate(ys):
        assert same(one, linear(x.bfloat16(), packed[e], bias[e].bfloat16() if e else None))


def test_experts_are_compiled_without_a_graph_break():
    packed, offs = u.pack(EXPERTS, stacked=True), torch.tensor(ENDS, dtype=torch.int32)

    def block(x: torch.Tensor) -> torch.Tensor:
        up, gate = torch.ops.unweight.linear_many(x.relu(), [packed[0], packed[1]], [None, None])
        return (torch.ops.unweight.grouped_linear(x, packed, offs) + up * gate).sum(-1)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (8, 9):
        x = tokens(m, 129, dtype=torch.float32).requires_grad_()
        torch.testing.assert_close(compiled(x), block(x))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(block(x).sum(), x))
