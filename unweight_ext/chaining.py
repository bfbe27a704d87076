"""Which packed Linear comes next: a GPU fetches the first part of its weight while the product before it ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .nn import Linear


def chain(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Runs `model(*args, **kwargs)` once and tells each packed Linear in it which one ran after it.

    From then on, products with up to 64 rows ask for the next weight while they end, so that the GPU's memory doesn't
    idle between two of them; the last asks for the first one's, as when tokens are generated one by one. Results don't
    change, whatever order the modules run in later, and nothing changes on a CPU. A module that ran several times keeps
    what followed the first time; one that didn't run is told nothing, and what an earlier call said is forgotten. A
    CUDA graph of a part of the model reads the weight that comes next, too: it has to stay where it is. Copies of the
    model are told nothing. The run is a real one, without gradients: put the model into eval mode if that matters.
    Returns how many modules know what comes next. Raises RuntimeError if none of the packed Linears ran, as in a model
    that has been compiled: chain it before.
    """
    modules = [module for module in model.modules() if isinstance(module, Linear)]
    order: list[Linear] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: order.append(module)) for module in modules]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if modules and not order:
        raise RuntimeError(
            f"chain: none of the model's {len(modules)} packed Linears was seen to run; "
            "chain a model before it is compiled"
        )
    following: dict[Linear, Linear] = {}
    for module, after in zip(order, [*order[1:], *order[:1]], strict=True):
        if after is not module:
            following.setdefault(module, after)
    for module in modules:
        module.set_next(following.get(module))
    return len(following)
