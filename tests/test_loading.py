"""A packed checkpoint's tensors go into a model that went through compress_model, whatever that left plain."""

import copy
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import assert_same_bits, weight
from torch import nn

import unweight_ext as u

BF16 = torch.bfloat16


class Model(nn.Module):
    """A Linear that is packed, and what is packed on disk alone: a router, a convolution, bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 128, dtype=BF16)
        self.router = nn.Linear(4096, 8, bias=False, dtype=BF16)
        self.skipped = nn.Linear(256, 128, bias=False, dtype=BF16)
        self.conv = nn.Conv2d(32, 64, 3, dtype=BF16)
        self.experts = nn.Parameter(torch.zeros(2, 64, 256, dtype=BF16))
        self.norm = nn.LayerNorm(256)


@pytest.fixture
def plain() -> dict[str, torch.Tensor]:
    model = Model()
    for p in model.parameters():
        if p.dim() > 1:
            p.data = weight("few outsiders", p.shape[0], p[0].numel()).reshape(p.shape)
    return model.state_dict()


@pytest.fixture
def packed(plain: dict[str, torch.Tensor], tmp_path: Path) -> dict[str, torch.Tensor]:
    save_file(plain, tmp_path / "plain.safetensors")
    u.compress_checkpoint(tmp_path / "plain.safetensors", tmp_path / "packed.safetensors")
    state = load_file(tmp_path / "packed.safetensors")
    assert {k for k in state if k.endswith("weight_packed")} == {
        *(f"{name}.weight_packed" for name in ("up", "router", "skipped", "conv", "experts"))
    }
    return state


def fresh() -> Model:
    model = Model()
    report = u.compress_model(model, skip="skipped")
    assert [row.name for row in report.packed] == ["up"]
    return model


def assert_holds(model: Model, plain: dict[str, torch.Tensor]) -> None:
    for name, wanted in plain.items():
        found = model.up.weight if name == "up.weight" else model.get_parameter(name)
        if wanted.dtype == BF16:
            assert_same_bits(found, wanted)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("assign", [False, True])
def test_packed_tensors_go_into_plain_and_packed_modules(plain, packed, assign):
    before = dict(packed)
    model = fresh()
    model.load_state_dict(packed, assign=assign)
    assert_holds(model, plain)
    assert packed.keys() == before.keys() and all(packed[k] is before[k] for k in before)  # the caller's, untouched


def test_plain_tensors_and_the_model_s_own_still_load(plain):
    model, other = fresh(), fresh()
    model.load_state_dict(plain)
    other.load_state_dict(model.state_dict())
    assert_holds(other, plain)


def test_within_another_module_after_a_copy_and_from_a_file(plain, packed):
    file = io.BytesIO()
    torch.save(copy.deepcopy(fresh()), file)
    file.seek(0)
    outer = nn.ModuleDict({"inner": torch.load(file, weights_only=False)})
    outer.load_state_dict({f"inner.{k}": v for k, v in packed.items()})
    assert_holds(outer["inner"], plain)


def test_a_second_compress_model_adds_no_second_hook(plain, packed):
    model = fresh()
    u.compress_model(model, skip="skipped")
    assert len(model._load_state_dict_pre_hooks) == 1


def test_damaged_unknown_and_missing_tensors_are_told(packed):
    damaged = packed["router.weight_packed"].clone()
    damaged.view(-1)[1000] ^= 1
    with pytest.raises(RuntimeError, match=r"router.weight_packed: packed: the checksum .* the bytes are damaged"):
        fresh().load_state_dict(packed | {"router.weight_packed": damaged})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "nobody.weight_packed"'):
        fresh().load_state_dict(packed | {"nobody.weight_packed": damaged})
    del packed["router.weight_packed"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "router.weight"'):
        fresh().load_state_dict(packed)
    wrong = u.pack(weight("trained", 9, 4096), "archive")
    with pytest.raises(RuntimeError, match=r"size mismatch for router.weight"):
        fresh().load_state_dict(packed | {"router.weight_packed": wrong})
