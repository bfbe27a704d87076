"""Linear and Embedding as drop-ins: values, `.weight`, state_dicts, copies, dtypes."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from samples import LAYOUTS, assert_same_bits, weight
from test_packed import changed, pack
from torch import nn

import unweight_ext as u

# Most weights here are small and odd on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*compress_model leaves such a module as it is")


def plain_linear(n: int = 65, k: int = 129, bias: bool = True, content: str = "trained", seed: int = 0) -> nn.Linear:
    linear = nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    linear.weight.data = weight(content, n, k, seed)
    return linear


def plain_embedding(n: int = 70, k: int = 130, **options: object) -> nn.Embedding:
    embedding = nn.Embedding(n, k, dtype=torch.bfloat16, **options)
    embedding.weight.data = weight("trained", n, k)
    return embedding


X = torch.randn(5, 129, generator=torch.Generator().manual_seed(0)).bfloat16()
IDS = torch.tensor([[1, 69], [0, 1]])


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(layout, bias):
    plain = plain_linear(bias=bias)
    packed = u.Linear.from_linear(plain, layout=layout)
    exact = u.Linear.from_linear(plain, layout=layout, exact=True)
    assert packed.layout == u.info(packed.weight_packed).layout
    assert torch.equal(exact(X), plain(X))
    torch.testing.assert_close(packed(X), plain(X))
    assert packed.bias is plain.bias
    y = packed(X.float())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.linear(X.float(), plain.weight.float(), plain.bias.float() if bias else None))


def test_linear_gives_gradients_to_x_and_bias():
    plain, x = plain_linear(), X.clone().requires_grad_()
    packed = u.Linear.from_linear(plain)
    packed(x).sum().backward()
    got = x.grad, plain.bias.grad
    x.grad = plain.bias.grad = None
    plain(x).sum().backward()
    torch.testing.assert_close(got, (x.grad, plain.bias.grad))
    assert [name for name, _ in packed.named_parameters()] == ["bias"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding(layout):
    plain = plain_embedding(padding_idx=3)
    packed = u.Embedding.from_embedding(plain, layout=layout)
    assert_same_bits(packed(IDS), plain(IDS).detach())
    assert_same_bits(packed(IDS.int()), plain(IDS).detach())
    assert packed.padding_idx == 3 and "padding_idx=3" in repr(packed)


def test_weight_is_decoded_on_access_and_read_only():
    plain = plain_linear(content="few outsiders")
    packed = u.Linear.from_linear(plain)
    assert_same_bits(packed.weight, plain.weight.detach())
    assert not packed.weight.requires_grad
    for value in (plain.weight, plain.weight.detach(), None):
        with pytest.raises(AttributeError, match=r"Linear.weight is read-only.*use set_weight\(tensor\)"):
            packed.weight = value
    other = weight("trained", 65, 129, seed=5)
    packed.set_weight(other)
    assert_same_bits(packed.weight, other)


def test_repr_shows_size_and_layout():
    packed = u.Linear.from_linear(plain_linear(512, 512), exact=True)
    bits = f"{u.info(packed.weight_packed).bits_per_weight:.2f}"
    assert repr(packed) == (
        f"Linear(in_features=512, out_features=512, bias=True, layout=nibble, bits_per_weight={bits}, exact=True)"
    )
    assert repr(u.Embedding(7, 9)) == "Embedding(7, 9, layout=None, bits_per_weight=0.00)"


@pytest.mark.parametrize("shape", [(1, 4096), (4096, 3)])
def test_modules_that_would_be_larger_than_plain_ones_say_so(shape):
    w = weight("trained", *shape)
    n, k = shape
    message = rf"{n} x {k} weights take \d+ bytes packed, {2 * n * k} in a torch.nn.(Linear|Embedding); compress_model"
    plain, table = plain_linear(n, k, bias=False), nn.Embedding(n, k, dtype=torch.bfloat16)
    plain.weight.data = table.weight.data = w
    for pack_it in (
        lambda: u.Linear.from_linear(plain),
        lambda: u.Embedding.from_embedding(table),
        lambda: u.Linear(k, n, bias=False).set_weight(w),
        lambda: u.Linear(k, n, bias=False).load_state_dict({"weight": w}),
        lambda: u.Linear(k, n, bias=False).load_state_dict({"weight_packed": u.pack(w, "archive")}),
    ):
        with pytest.warns(UserWarning, match=message):
            pack_it()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        u.Linear.from_linear(plain, layout="archive")
        u.Linear(k, n, bias=False).load_state_dict({"weight_packed": u.pack(w)})  # not of our making
        u.Linear.from_linear(plain_linear(256, 512))
        report = u.compress_model(nn.Sequential(plain))
    assert [row.reason.partition(":")[0] for row in report.left_alone] == ["doesn't pay"]


# -------------------------------------------------------------------------------------------------------- state_dicts


def test_state_dict_round_trip():
    plain = plain_linear()
    packed = u.Linear.from_linear(plain)
    state = packed.state_dict()
    assert sorted(state) == ["bias", "weight_packed"]
    new = u.Linear(129, 65)
    new.load_state_dict(saved_and_loaded(state))
    assert torch.equal(new(X), packed(X)) and new.layout == "nibble"
    embedding = u.Embedding.from_embedding(plain_embedding())
    other = u.Embedding(70, 130)
    other.load_state_dict(saved_and_loaded(embedding.state_dict()))
    assert torch.equal(other(IDS), embedding(IDS))


# Without assign, torch itself warns and leaves parameters on meta alone.
@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
def test_load_accepts_other_sizes_and_layouts(assign, device):
    plain = plain_linear(bias=False)
    for layout in LAYOUTS:
        payload = pack(plain.weight.detach(), layout)
        payload = u.pad_row_bytes(payload, payload.shape[1] + 33)
        new = u.Linear(129, 65, bias=False, device=device)
        for _ in range(2):  # into an empty module, and over a weight
            new.load_state_dict({"weight_packed": payload}, assign=assign)
            assert new.layout == ("nibble" if layout == "archive" else u.info(payload).layout)
            assert_same_bits(new.weight, plain.weight.detach())
            torch.testing.assert_close(new(X), plain(X))
        if not assign:
            assert new.weight_packed.data_ptr() != payload.data_ptr()


def test_load_turns_archive_into_the_layout_asked_for():
    w = weight("trained", 65, 129)
    for layout, becomes in (("auto", "nibble"), ("huffman", "huffman"), ("archive", "archive")):
        new = u.Linear(129, 65, bias=False, layout=layout)
        new.load_state_dict({"weight_packed": u.pack(w, "archive")})
        assert new.layout == becomes and torch.equal(new.weight_packed, u.pack(w, becomes))


def test_load_takes_plain_bf16_weights():
    plain = plain_linear()
    model = nn.Sequential(u.Linear(129, 65, layout="huffman"))
    model.load_state_dict({f"0.{key}": value for key, value in plain.state_dict().items()})
    assert model[0].layout == "huffman"
    assert_same_bits(model[0].weight, plain.weight.detach())
    assert torch.equal(model[0].bias, plain.bias)


def test_load_realigns():
    payload = u.pack(weight("trained", 65, 129))
    odd = torch.empty(payload.numel() + 64, dtype=torch.uint8)
    odd = odd[2 + -odd.data_ptr() % 64 :][: payload.numel()].view(payload.shape).copy_(payload)
    assert odd.data_ptr() % 64 == 2
    new = u.Linear(129, 65, bias=False)
    new.load_state_dict({"weight_packed": odd}, assign=True)
    assert new.weight_packed.data_ptr() % 64 == 0 and torch.equal(new.weight_packed, payload)


GOOD = u.pack(weight("trained", 65, 129))


@pytest.mark.parametrize(
    "state, message",
    [
        ({"weight_packed": changed(GOOD, 4000, 255)}, r"weight_packed: packed: the checksum of row block"),
        ({"weight_packed": changed(GOOD, 8, 3)}, r"weight_packed: packed: format version 3"),
        ({"weight_packed": GOOD[:40]}, r"weight_packed: packed"),
        ({"weight_packed": GOOD.float()}, r"weight_packed: packed: dtype torch.float32, expected torch.uint8"),
        (
            {"weight_packed": u.pack(weight("trained", 65, 130))},
            r"\sweight_packed: holds 1 x 65 x 130 weights, expected 1 x 65 x 129",
        ),
        ({"weight": torch.zeros(65, 129)}, r"\sweight: dtype torch.float32, expected torch.bfloat16"),
        ({"weight": weight("trained", 64, 129)}, r"weight: shape \[64, 129\], expected \[65, 129\]"),
        ({}, r"Missing key\(s\) in state_dict: \"weight_packed\""),
        ({"weight_packed": GOOD, "scales": torch.zeros(1)}, r"Unexpected key\(s\) in state_dict: \"scales\""),
        ({"weight_packed": GOOD, "weight": torch.zeros(1)}, r"Unexpected key\(s\) in state_dict: \"weight\""),
    ],
)
def test_bad_payloads_are_refused_and_change_nothing(state, message):
    module = u.Linear.from_linear(plain_linear(bias=False, seed=3))
    before = module.weight_packed.clone()
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state)
    if "weight_packed" not in state or len(state) == 1:
        assert torch.equal(module.weight_packed, before)


# ----------------------------------------------------------------------------------------- copies, moves and the rest


def test_deepcopy_and_pickle():
    packed = u.Linear.from_linear(plain_linear(), exact=True)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(other(X), packed(X))
        assert other.weight_packed.data_ptr() != packed.weight_packed.data_ptr()
        assert (other.layout, other.exact) == (packed.layout, packed.exact)


def test_dtype_changes_leave_the_weight_alone():
    module = u.Linear.from_linear(plain_linear())
    before = module.weight_packed
    for change in (module.half, module.float, module.bfloat16, lambda: module.to(torch.float64)):
        change()
        assert module.weight_packed is before and before.dtype == torch.uint8
    module.float()
    assert module.bias.dtype == torch.float32 and module(X.float()).dtype == torch.float32
    assert module(X).dtype == torch.bfloat16


def test_other_devices():
    module = u.Linear.from_linear(plain_linear())
    on_meta = copy.deepcopy(module).to("meta")
    assert on_meta.weight_packed.shape == module.weight_packed.shape
    assert on_meta(X.to("meta")).shape == (5, 65) and on_meta.weight.shape == (65, 129)
    with pytest.raises(RuntimeError, match=r"x: dtype torch.float16"):
        module(X.half())


def test_modules_without_a_weight_say_what_to_do():
    for module, name, argument in ((u.Linear(129, 65), "linear", X), (u.Embedding(70, 130), "embedding", IDS)):
        for use in (lambda m=module, a=argument: m(a), lambda m=module: m.weight):
            with pytest.raises(RuntimeError, match=f"no weight yet: use load_state_dict, set_weight or from_{name}"):
                use()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: u.Linear(0, 5), "Linear: 5 x 0 weights, expected at least 1 x 1"),
        (lambda: u.Linear(5, 5, layout="zip"), "layout: 'zip'"),
        (lambda: u.Linear.from_linear(nn.Linear(5, 5)), "weight: dtype torch.float32, expected torch.bfloat16"),
        (lambda: u.Embedding.from_embedding(plain_embedding(max_norm=1.0)), "embedding: max_norm=1.0 changes"),
        (lambda: u.Embedding.from_embedding(plain_embedding(sparse=True)), "embedding: sparse=True"),
        (
            lambda: u.Embedding.from_embedding(plain_embedding(scale_grad_by_freq=True)),
            "embedding: scale_grad_by_freq=True",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_module_compiles_without_a_graph_break():
    model = nn.Sequential(u.Embedding.from_embedding(plain_embedding(70, 129)), u.Linear.from_linear(plain_linear()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS), model(IDS))


@pytest.mark.slow
def test_a_module_compiles_with_inductor():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = u.Linear.from_linear(plain_linear()), nn.LayerNorm(65, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(F.gelu(self.up(x)) * 2)

    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for m in (2, 7):
        x = X[:1].repeat(m, 1).requires_grad_()
        torch.testing.assert_close(compiled(x), block(x), atol=2e-2, rtol=2e-2)
        compiled(x).sum().backward()
        assert x.grad.isfinite().all()


def test_packed_bytes_from_anywhere_are_realigned():
    plain = plain_linear(bias=False)
    packed = pack(plain.weight.detach(), "nibble")
    room = torch.zeros(packed.shape[0], packed.shape[1] + 3, dtype=torch.uint8)
    room[:, 1 : 1 + packed.shape[1]] = packed
    new = u.Linear(plain.in_features, plain.out_features, bias=False)
    new.set_packed(room[:, 1 : 1 + packed.shape[1]])
    assert_same_bits(new.weight, plain.weight.detach())
    assert new(torch.ones(1, plain.in_features, dtype=torch.bfloat16)).shape == (1, plain.out_features)
