"""Modules that know which one comes next: unweight_ext.chain."""

import copy
import pickle

import pytest
import torch
from samples import weight
from torch import nn

import unweight_ext as u

# Weights here are small on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*compress_model leaves such a module as it is")
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def linear(n: int, k: int, seed: int) -> u.Linear:
    plain = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    plain.weight.data = weight("trained", n, k, seed)
    return u.Linear.from_linear(plain)


class Model(nn.Module):
    """Its modules don't run in the order in which they are defined, one runs twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.first, self.second, self.unused = (linear(64, 64, seed) for seed in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(self.second(self.first(x)))))


def next_of(module: u.Linear) -> u.Linear | None:
    return module._next[0] if module._next else None


def test_each_module_is_told_what_ran_after_it() -> None:
    model = Model()
    before, names = model(X), set(model.state_dict())
    assert u.chain(model, X) == 3
    # `second` was followed by `first` the first time.
    assert next_of(model.first) is model.second
    assert next_of(model.second) is model.first
    assert next_of(model.third) is model.first
    assert next_of(model.unused) is None
    assert torch.equal(model(X), before)
    assert set(model.state_dict()) == names
    assert len(list(model.modules())) == 5


def test_copies_are_told_nothing() -> None:
    """A module that is copied or saved doesn't take the others with it, and many in a row are no deep recursion."""
    model = Model()
    size = len(pickle.dumps(model.first))
    u.chain(model, X)
    assert len(pickle.dumps(model.first)) == size
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert next_of(other.first) is None
        assert torch.equal(other(X), model(X))
        assert u.chain(other, X) == 3 and next_of(other.first) is other.second
    many = nn.Sequential(*[linear(1, 1, seed) for seed in range(1200)])
    assert u.chain(many, X[:, :1]) == 1200
    assert len(copy.deepcopy(many)) == len(pickle.loads(pickle.dumps(many))) == 1200


def test_what_comes_next_is_a_packed_linear() -> None:
    with pytest.raises(TypeError, match="^following: Linear, expected an unweight_ext.Linear or None"):
        linear(64, 64, 0).set_next(nn.Linear(64, 64))


def test_a_model_whose_modules_are_not_seen_to_run() -> None:
    class Idle(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(RuntimeError, match="^chain: none of the model's 4 packed Linears was seen to run"):
        u.chain(Idle(), X)
    assert u.chain(nn.Linear(64, 64), X.float()) == 0


def test_the_next_weight_is_the_one_that_the_module_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Model(), []
    u.chain(model, X)
    model.second.set_weight(weight("trained", 64, 64, 9))
    run = u.nn.ops.linear
    monkeypatch.setattr(u.nn.ops, "linear", lambda x, w, b, following, **o: seen.append(following) or run(x, w, b, **o))
    model.first(X)
    assert seen[0] is model.second.weight_packed
    model.second.to("meta")  # elsewhere: no hint
    model.first(X)
    assert seen[1] is None


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Model()
    u.chain(model, X)
    with pytest.raises(RuntimeError):
        u.chain(model, X[:, :3])
    assert next_of(model.first) is model.second
    assert not model.first._forward_pre_hooks


def test_another_run_replaces_what_was_said() -> None:
    model = nn.ModuleList([linear(64, 64, 0), linear(64, 64, 1)])
    both = nn.Sequential(*model)
    assert u.chain(both, X) == 2
    assert u.chain(both[:1], X) == 0  # alone: nothing to say
    assert next_of(model[0]) is None and next_of(model[1]) is model[0]
    model[1].set_next(None)
    assert next_of(model[1]) is None


def test_compiled_in_one_graph() -> None:
    model = Model()
    u.chain(model, X)
    given = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        products = [node for node in graph.graph.nodes if node.target is torch.ops.unweight.linear.default]
        given.extend(len(node.args) > 3 and node.args[3] is not None for node in products)
        return graph

    assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(X), model(X))
    assert given == [True] * 5, "a product in the graph isn't told what comes next"
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(X), model(X))
