"""compress_model on small models with every kind of module that it meets."""

import copy
import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from samples import assert_same_bits, weight
from test_nn import plain_embedding, plain_linear
from torch import nn

import unweight_ext as u
from unweight_ext.convert import CompressReport

IDS = torch.tensor([[1, 69], [0, 1]])


class Model(nn.Module):
    """An embedding tied to its head, two layers of one shape in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = plain_embedding(200, 128)
        self.layers = nn.ModuleList(plain_linear(128, 128, content=c) for c in ("trained", "few outsiders"))
        self.layers[1].weight.data.nan_to_num_(0, 1, 1)
        self.norm = nn.LayerNorm(128, dtype=torch.bfloat16)
        self.head = nn.Linear(128, 200, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.norm(x + F.gelu(layer(x)))
        return self.head(x)


def reasons(report: CompressReport) -> dict[str, str]:
    return {row.name: row.reason for row in report.left_alone}


def test_a_model_gives_the_same_outputs():
    model, original = Model(), Model()
    expected = original(IDS)
    report = u.compress_model(model, exact=True)
    assert torch.equal(model(IDS), expected)
    assert [row.name for row in report.packed] == ["embed", "layers.0", "layers.1", "head"]
    assert not report.left_alone
    fused = copy.deepcopy(original)
    u.compress_model(fused)
    torch.testing.assert_close(fused(IDS), expected, atol=0.1, rtol=0.05)
    for name, module in original.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert_same_bits(model.get_submodule(name).weight, module.weight.detach())


def test_tied_weights_stay_tied_through_everything():
    model = Model()
    report = u.compress_model(model, exact=True)
    expected = model(IDS)
    assert {row.name: row.reason for row in report.packed}["head"] == "tied to embed"

    def tied(m: nn.Module) -> bool:
        return m.embed.weight_packed is m.head.weight_packed and m.embed.layout == m.head.layout == "nibble"

    assert tied(model)
    assert tied(copy.deepcopy(model))
    assert tied(model.half()) and tied(model.bfloat16())
    state = model.state_dict()
    assert state["embed.weight_packed"].data_ptr() == state["head.weight_packed"].data_ptr()
    for row_bytes in (0, 40):
        new = copy.deepcopy(model)
        for key in state:
            if key.endswith("weight_packed"):
                state[key] = u.pad_row_bytes(state[key], state[key].shape[1] + row_bytes)
        new.load_state_dict(state)
        assert tied(new) and torch.equal(new(IDS), expected)
    archived = {k: u.transcode(v, "archive") if k.endswith("weight_packed") else v for k, v in state.items()}
    model.load_state_dict(archived)
    assert tied(model) and torch.equal(model(IDS), expected)
    model.load_state_dict(Model().state_dict())
    assert tied(model) and torch.equal(model(IDS), expected)


def test_moving_to_another_device_keeps_weights_tied():
    model = Model()
    u.compress_model(model)
    # There may be no second device: `to_empty` takes the same way through the module.
    model.to_empty(device="cpu")
    assert model.embed.weight_packed is model.head.weight_packed


def test_report_and_sizes():
    model = Model()
    report = u.compress_model(model)
    before = sum(p.nbytes for p in Model().parameters())
    after = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert (report.model_bytes_before, report.model_bytes_after) == (before, after)
    rows = {row.name: row for row in report.rows}
    assert rows["embed"].bytes_before == 200 * 128 * 2
    assert rows["embed"].bytes_after == model.embed.weight_packed.numel()
    assert (rows["head"].bytes_before, rows["head"].bytes_after) == (0, 0)
    assert rows["layers.0"].bits_per_weight == model.layers[0].bits_per_weight
    data = json.loads(report.to_json())
    assert data["model_bytes_after"] == after and data["rows"][1]["layout"] == "nibble"
    text = str(report)
    assert "layers.1" in text and "tied to embed" in text and "4 packed, 0 left alone" in text
    assert f"{100 * after / before:.1f} %" in text


def test_equal_shapes_get_one_row_bytes():
    model = Model()
    u.compress_model(model)
    sizes = [len(u.pack(layer.weight)[0]) for layer in model.layers]
    assert sizes[0] != sizes[1]  # else this shows nothing
    assert [layer.weight_packed.shape[1] for layer in model.layers] == [max(sizes)] * 2
    for layer in model.layers:
        u.verify(layer.weight_packed)


def test_weights_are_freed_as_it_goes():
    model = nn.Sequential(*(plain_linear(128, 128) for _ in range(4)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen = []

    def progress(done: int, total: int, name: str) -> None:
        seen.append((done, total, name, sum(ref() is not None for ref in alive)))

    u.compress_model(model, progress=progress)
    size = 128 * 128 * 2
    assert seen == [((i + 1) * size, 4 * size, str(i), 3 - i) for i in range(4)]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bar_is_for_terminals(terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    u.compress_model(Model())
    out = capsys.readouterr()
    assert bool(out.err) == terminal and not out.out


def test_the_bar_shows_names_as_they_are(capsys):
    """rich would take square brackets for markup, and refuse this one."""
    model = nn.Module()
    model.add_module("[/x]", plain_linear(128, 128))
    u.compress_model(model, progress=True)
    assert "[/x]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "skip, skipped",
    [
        ("head", {"head", "embed"}),  # one weight: both or none
        ("layers", {"layers.0", "layers.1"}),
        (["layers.1", "nothing"], {"layers.1"}),
        (("*.0",), {"layers.0"}),
        (lambda name, module: isinstance(module, nn.Linear), {"layers.0", "layers.1", "head", "embed"}),
    ],
)
def test_skip(skip, skipped):
    model = Model()
    report = u.compress_model(model, skip=skip)
    assert set(reasons(report)) == skipped
    for name in ("embed", "head", "layers.0", "layers.1"):
        assert isinstance(model.get_submodule(name), (nn.Linear, nn.Embedding)) == (name in skipped)


def test_a_skip_that_fits_nothing_is_told():
    with pytest.warns(UserWarning, match=r"skip: 'layer.0' fits no module of the model"):
        u.compress_model(Model(), skip=("layers.0", "layer.0"))


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Sharing(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.kernel = weight


def test_what_can_not_be_packed_is_left_alone_with_its_reason():
    model = nn.ModuleDict(
        {
            "float32": nn.Linear(64, 64),
            "noise": plain_linear(64, 128, content="any bits"),
            "subclass": Doubling(64, 64, dtype=torch.bfloat16),
            "parametrized": nn.utils.parametrizations.weight_norm(plain_linear(64, 64)),
            "attention": nn.MultiheadAttention(64, 2, dtype=torch.bfloat16),
            "max_norm": plain_embedding(64, 64, max_norm=1.0),
            "shared": plain_linear(64, 64),
            "meta": nn.Linear(64, 64, dtype=torch.bfloat16, device="meta"),
            "replaced": plain_linear(64, 64),
            "more": plain_linear(64, 64),
            "good": plain_linear(64, 128),
            "ours": u.Linear.from_linear(plain_linear(64, 128)),
        }
    )
    model["sharing"] = Sharing(model["shared"].weight)
    model["replaced"].forward = lambda x: x
    model["more"].register_buffer("mask", torch.ones(64))
    kept = {name: module for name, module in model.items() if name != "good"}
    report = u.compress_model(model)
    found = reasons(report)
    expected = {
        "float32": "float32, only bfloat16 is packed",
        "noise": "doesn't pay: ",
        "subclass": "a subclass, Doubling,",
        "parametrized": "parametrized",
        "attention.out_proj": "torch.nn.MultiheadAttention reads its weight",
        "max_norm": "max_norm=1.0 changes",
        "shared": "shared with sharing.kernel",
        "meta": "on meta: there are kernels for CPUs and CUDA devices",
        "replaced": "its forward was replaced",
        "more": "it holds more than weight and bias: mask",
        "ours": "already packed",
    }
    assert set(found) == set(expected)
    for name, reason in expected.items():
        assert found[name].startswith(reason), (name, found[name])
    assert all(model[name] is module for name, module in kept.items())
    assert [row.name for row in report.packed] == ["good"]
    assert "1 packed, 11 left alone" in str(report)


def test_a_second_time_changes_nothing():
    model = Model()
    u.compress_model(model)
    modules = dict(model.named_modules())
    report = u.compress_model(model)
    assert not report.packed and report.model_bytes_before == report.model_bytes_after
    assert dict(model.named_modules()) == modules


def test_hooks_attributes_and_shared_modules_are_kept():
    layer, calls = plain_linear(128, 128).eval(), []
    model = nn.ModuleDict({"a": layer, "b": layer, "list": nn.ModuleList([layer])})
    handles = [
        layer.register_forward_hook(lambda module, args, out: calls.append("after")),
        layer.register_forward_pre_hook(lambda module, args: calls.append("before")),
        layer.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward")),
    ]
    layer.tag = "kept"
    report = u.compress_model(model)
    new = model["a"]
    assert isinstance(new, u.Linear) and new is model["b"] is model["list"][0] and len(report.rows) == 1
    assert new.tag == "kept" and not new.training and new.bias is layer.bias
    x = torch.ones(1, 128, dtype=torch.bfloat16, requires_grad=True)
    new(x).sum().backward()
    assert calls == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    new(x)
    assert len(calls) == 3


def test_layouts():
    for layout, used in (("auto", "nibble"), ("huffman", "huffman"), ("archive", "archive")):
        model = Model()
        report = u.compress_model(model, layout)
        assert {row.layout for row in report.packed} == {used}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: u.compress_model(Model(), "zip"), "layout: 'zip'"),
        (lambda: u.compress_model(plain_linear()), "model: is itself a Linear.*use Linear.from_linear"),
        (lambda: u.compress_model(plain_embedding()), "model: is itself a Embedding.*use Embedding.from_embedding"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("skip", [3, ["head", 3], None])
def test_wrong_types(skip):
    with pytest.raises(TypeError, match="model: dict, expected a torch.nn.Module"):
        u.compress_model({})
    with pytest.raises(TypeError, match="skip: .*, expected names or patterns, or a function"):
        u.compress_model(Model(), skip=skip)


def test_attention_and_transformer_layers_still_run():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dtype=torch.bfloat16).eval()
    x = torch.randn(2, 5, 128).bfloat16()
    original = copy.deepcopy(layer)
    report = u.compress_model(layer, exact=True)
    assert {row.name for row in report.packed} == {"linear1", "linear2"}
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            assert torch.equal(layer(x), original(x))


def test_packing_keeps_the_odd_weights_bits():
    model = nn.Sequential(plain_linear(130, 260, content="subnormals"), plain_linear(130, 260, content="zero rows"))
    u.compress_model(model)
    assert_same_bits(model[0].weight, weight("subnormals", 130, 260))
    assert_same_bits(model[1].weight, weight("zero rows", 130, 260))


def test_weights_tied_by_memory_alone_stay_tied():
    model = nn.ModuleDict({name: nn.Linear(128, 256, bias=False, dtype=torch.bfloat16) for name in "ab"})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    report = u.compress_model(model)
    assert model["a"].weight_packed is model["b"].weight_packed
    assert report.model_bytes_before == 2 * 128 * 256
    assert [row.bytes_before for row in report.packed] == [2 * 128 * 256, 0]


def test_modules_elsewhere_than_on_the_cpu_are_left_alone():
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16, device="meta"))
    assert reasons(u.compress_model(model)) == {"0": "on meta: there are kernels for CPUs and CUDA devices"}
