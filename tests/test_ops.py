"""torch.ops.unweight: look-ups, unpacking, and what compilers need of every operator."""

import pytest
import torch
from capability import CAPABILITIES, capability
from products import tokens
from samples import CONTENTS, LAYOUTS, SHAPES, assert_same_bits, weight
from test_packed import pack
from torch.library import opcheck

import unweight_ext as u
from unweight_ext import ops

linear = torch.ops.unweight.linear


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("exact", [False, True], ids=["fused", "exact"])
def test_opcheck_linear(layout, grad, exact):
    packed = pack(weight("trained", 65, 129), layout)
    for x, bias in ((tokens(2, 3, 129), tokens(65)), (tokens(129, dtype=torch.float32), None), (tokens(0, 129), None)):
        bias = () if bias is None else (bias.requires_grad_(grad),)
        opcheck(linear.default, (x.requires_grad_(grad), packed, *bias), {"exact": exact})
    hinted = (
        tokens(3, 129).requires_grad_(grad),
        packed,
        tokens(65).requires_grad_(grad),
        pack(weight("trained", 3, 65), "nibble"),
    )
    opcheck(linear.default, hinted, {"exact": exact})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_opcheck_several_weights(layout, grad, out_dtype):
    w = torch.stack([weight("trained", 65, 129, seed) for seed in range(3)])
    packed, x, offs = pack(w, layout, stacked=True), tokens(5, 129).requires_grad_(grad), torch.tensor([1, 1, 4]).int()
    bias = tokens(3, 65, seed=2).requires_grad_(grad)
    for more in ((), (bias,), (bias, packed[1])):
        opcheck(torch.ops.unweight.grouped_linear.default, (x, packed, offs, *more), {"out_dtype": out_dtype})
    arguments = (x, [packed[0], packed[2]], [None, tokens(65).requires_grad_(grad)])
    for more in ((), (packed[1],)):
        opcheck(
            torch.ops.unweight.linear_many.default, (*arguments, *more), {"layouts": [-1, -1], "out_dtype": out_dtype}
        )


def test_a_hint_of_the_next_weight_changes_nothing():
    packed, following, x = (
        pack(weight("trained", 65, 129), "nibble"),
        pack(weight("trained", 7, 65), "huffman"),
        tokens(3, 129),
    )
    bias, offs = tokens(65), torch.tensor([3]).int()
    ops = torch.ops.unweight
    assert torch.equal(ops.linear(x, packed, bias, following), ops.linear(x, packed, bias))
    hinted = ops.linear_many(x, [packed], [bias], following)
    assert torch.equal(hinted[0], ops.linear_many(x, [packed], [bias])[0])
    grouped = ops.grouped_linear(x, packed[None], offs, bias[None], following)
    assert torch.equal(grouped, ops.grouped_linear(x, packed[None], offs, bias[None]))


@pytest.mark.parametrize(
    "following, message",
    [
        (torch.zeros(3, 4), "next_w: dtype torch.float32, expected torch.uint8"),
        (torch.zeros(4, dtype=torch.uint8), r"next_w: shape \[4\], expected \[out_features, row_bytes\]; of experts"),
        (torch.zeros(4, 6, dtype=torch.uint8).t(), "next_w: is not contiguous, expected the tensor as pack made it"),
    ],
)
def test_hints_that_are_no_packed_weight(following, message):
    packed, x = pack(weight("trained", 65, 129), "nibble"), tokens(3, 129)
    for name, arguments in (
        ("linear", (x, packed, None)),
        ("linear_many", (x, [packed], [None])),
        ("grouped_linear", (x, packed[None], torch.tensor([3]).int(), None)),
    ):
        with pytest.raises(RuntimeError, match=f"^{message}"):
            getattr(torch.ops.unweight, name)(*arguments, following)


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
    x = tokens(5, 129).to("meta")
    assert linear(x, packed, out_dtype=torch.float32).dtype == torch.float32
    assert torch.ops.unweight._linear_config(x, packed, tokens=16).shape == (5, 65)
    offs = torch.zeros(3, dtype=torch.int32, device="meta")
    assert torch.ops.unweight.grouped_linear(x, packed.expand(3, -1, -1), offs).shape == (5, 65)
    assert [y.shape for y in torch.ops.unweight.linear_many(x, [packed] * 2, [None] * 2)] == [(5, 65)] * 2
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


def names_of_operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("unweight::") for name in names if name.startswith("unweight::"))


def test_cuda_tensors_get_a_message_of_ours_not_the_dispatcher_s():
    for name in names_of_operators():
        keys = ("CUDA", "CompositeExplicitAutograd")
        assert any(torch._C._dispatch_has_kernel_for_dispatch_key(f"unweight::{name}", key) for key in keys), name


def test_operators_that_wait_stay_out_of_cuda_graphs():
    for name in names_of_operators():
        tags = getattr(torch.ops.unweight, name).default.tags
        assert (torch.Tag.cudagraph_unsafe in tags) == (name in ops.WAITING)
    assert "unpack" in ops.WAITING and "linear" not in ops.WAITING


def test_supported_configs():
    every = ops.supported_configs()
    assert every[0] == 0 and every[1:] == sorted(every[1:]) and 64 in every
    assert [ops.supported_configs(layout) for layout in range(4)] == [every, every, every, [0]]


def test_tuned_tables_are_kept_by_gpu():
    entries = [1, 4096, 4096, 1024, 128, 2, 4096, 4096, 2048, 0]
    torch.ops.unweight._set_tuned("a GPU of the tests", entries)
    assert torch.ops.unweight._tuned("a GPU of the tests") == entries
    assert torch.ops.unweight._tuned("another") == []
    torch.ops.unweight._set_tuned("a GPU of the tests", [])
    assert torch.ops.unweight._tuned("a GPU of the tests") == []


def test_batch_invariance_is_a_switch():
    assert u.batch_invariant() is False
    try:
        assert u.batch_invariant(True) is False
        assert u.batch_invariant() is True and u.batch_invariant(True) is True
    finally:
        assert u.batch_invariant(False) is True
    assert u.batch_invariant() is False
    with pytest.raises(TypeError, match="enabled: int, expected a bool or None"):
        u.batch_invariant(1)
