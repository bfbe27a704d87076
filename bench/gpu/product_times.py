"""How long products with packed weights take with a cold L2, and cuBLAS's with plain ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .cold import copies_for, l2_bytes, measure
from .products import operators, packed_weight, plain_weight, random_x
from .record import ROOT
from .step import Step

if TYPE_CHECKING:
    from torch import Tensor

    from bench.products import Layer

# As bench/products.py names them: model and product.
TIMED = (
    *(f"Llama-3.1-8B {name}" for name in ("gate", "gate+up", "down", "QKV", "o")),
    *("Llama-3.1-70B gate", "Llama-3.1-70B down", "Qwen3-32B gate", "Mixtral-8x7B gate"),
)
TOKENS = (1, 16, 64, 128, 256, 1024)
HINTED_ROWS = 64  # a hint is of one weight, and of few rows
TIMES = tuple(f"{layout} {layer}" for layer in TIMED for layout in ("huffman", "nibble"))


def layer_of(unit: str) -> Layer:
    """The layer of bench/products.py that a unit of the timing step names."""
    from bench.products import LAYERS

    _, model, name = unit.split(" ")
    return next(layer for layer in LAYERS if (layer.model, layer.name) == (model, name))


def run_times(unit: str, device: str) -> dict:
    """Microseconds of the product, alone and told which weight comes next, and of cuBLAS's with plain weights, by
    number of rows; cold L2, one product after the other in a CUDA graph."""
    sys.path[:0] = [str(ROOT)]
    layer, layout = layer_of(unit), unit.split(" ")[0]
    if layer.experts:
        return times_of_experts(layout, *layer.shapes[0], {m: layer.product(m).tokens for m in TOKENS}, device)
    return times_of(layout, layer.shapes, TOKENS, device)


def times_of(layout: str, shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...], device: str) -> dict:
    import torch
    from torch.nn import functional

    from unweight_ext.ops import LAYOUTS as NUMBERS

    numbers = [NUMBERS.index(layout)] * len(shapes)
    packed = [packed_weight(layout, n, k, device, seed) for seed, (n, k) in enumerate(shapes)]
    plain = [plain_weight(n, k, seed).to(device) for seed, (n, k) in enumerate(shapes)]
    sets = {}
    for name, weights in (("packed", packed), ("plain", plain)):
        count = copies_for(sum(w.nbytes for w in weights), l2_bytes(device))
        sets[name] = [weights, *([w.clone() for w in weights] for _ in range(count - 1))]
    times = {}
    for m in tokens:
        x = random_x(m, shapes[0][1], device)

        def ours(weights: list[Tensor], x: Tensor = x) -> list[Tensor]:
            return operators().linear_many(x, weights, [None] * len(weights), layouts=numbers)

        def hinted(pair: list[Tensor], x: Tensor = x) -> list[Tensor]:
            *weights, following = pair
            return operators().linear_many(x, weights, [None] * len(weights), following, layouts=numbers)

        def cublas(weights: list[Tensor], x: Tensor = x) -> list[Tensor]:
            return [functional.linear(x, weight) for weight in weights]

        many = sets["packed"]
        followed = [[*weights, after[0]] for weights, after in zip(many, [*many[1:], *many[:1]], strict=True)]
        spent = {"microseconds": _time(ours, many, device), "cublas": _time(cublas, sets["plain"], device)}
        if len(shapes) == 1 and m <= HINTED_ROWS:
            spent["hinted"] = _time(hinted, followed, device)
        times[str(m)] = spent
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"weights": sum(n * k for n, k in shapes), "packed_bytes": sum(w.nbytes for w in packed), "times": times}


def times_of_experts(layout: str, n: int, k: int, rows: dict[int, tuple[int, ...]], device: str) -> dict:
    """`rows`: of each expert, by number of tokens. torch's product is one F.linear for each expert with rows."""
    from itertools import accumulate

    import torch
    from torch.nn import functional

    from unweight_ext.ops import LAYOUTS as NUMBERS
    from unweight_ext.packed import pack_quietly

    experts, number = len(next(iter(rows.values()))), NUMBERS.index(layout)
    stack = torch.stack([plain_weight(n, k, seed) for seed in range(experts)])
    packed = pack_quietly(stack, layout, stacked=True).to(device)
    plain = list(stack.to(device))
    copies = copies_for(packed.nbytes * 2 // experts, l2_bytes(device))  # two experts at least are hit
    sets, plain_sets = [[packed.clone()] for _ in range(copies)], [[w.clone() for w in plain] for _ in range(copies)]
    times = {}
    for m, counts in rows.items():
        x, ends = random_x(sum(counts), k, device), list(accumulate(counts))
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        parts = [(e, x[end - count : end]) for e, (end, count) in enumerate(zip(ends, counts, strict=True)) if count]

        def ours(weights: list[Tensor], x: Tensor = x, offs: Tensor = offs) -> Tensor:
            return operators().grouped_linear(x, weights[0], offs, layout=number)

        def cublas(weights: list[Tensor], parts: list[tuple[int, Tensor]] = parts) -> list[Tensor]:
            return [functional.linear(rows_of_one, weights[e]) for e, rows_of_one in parts]

        hit = packed.nbytes * len(parts) // experts
        spent = {"microseconds": _time(ours, sets, device), "cublas": _time(cublas, plain_sets, device)}
        times[str(m)] = {**spent, "packed_bytes": hit}
    return {"weights": experts * n * k, "packed_bytes": packed.nbytes, "times": times}


def _time(product: Callable[[list[Tensor]], object], sets: list[list[Tensor]], device: str) -> float:
    if device != "cuda":
        return measure(lambda turn: product(sets[turn % len(sets)]), device, runs=3, warm_up=1).median
    from unweight_ext.tuning.measure import replayed

    return replayed(lambda: [product(weights) for weights in sets], len(sets))


STEP = Step("product times", "products with a cold L2, and cuBLAS's", TIMES, run_times, 100, 40, ("build",))
