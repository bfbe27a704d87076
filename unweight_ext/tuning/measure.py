"""`unweight tune`: which way of a product is fastest on this GPU, measured with nothing of it in the L2."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..packed import info, pack_quietly
from .choices import INVARIANT_TOKENS, default_choice
from .predict import candidates
from .table import Entry

TIMES_L2 = 3
ROUNDS = 7
SCRATCH = 0
# Another way has to be faster by so much to be worth an entry: less is noise.
WORTH = 0.98


@dataclass(frozen=True)
class Case:
    """A weight and the most rows of x of a bucket."""

    layout: str
    out_features: int
    in_features: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.out_features}x{self.in_features} {self.layout} M={self.tokens}"


def ways_of(case: Case) -> list[int]:
    """Instances by their tokens, and SCRATCH, that may run: up to 64 rows only what gives the same bits."""
    fused = [config.tokens for config in candidates(case.tokens)]
    return fused if case.tokens <= INVARIANT_TOKENS else [*fused, SCRATCH]


def fastest(case: Case, time_of: Callable[[int], float]) -> Entry:
    """`time_of(way)`: microseconds of a product. The way that runs anyway stays unless another is clearly faster."""
    default = default_choice(case.layout, case.tokens)
    usual = default.tokens if default else SCRATCH
    spent = {way: time_of(way) for way in ways_of(case)}
    best = min(spent, key=spent.__getitem__)
    if spent[best] > WORTH * spent[usual]:
        best = usual
    shape = (case.layout, case.out_features, case.in_features, case.tokens)
    return Entry(*shape, best, spent[best], spent[usual])


def copies_for(bytes_read: int, l2_bytes: int) -> int:
    """How many weights to go through in turn, so that each was followed by more than three caches full of others."""
    return max(2, math.ceil(TIMES_L2 * l2_bytes / bytes_read) + 1)


def packed_weights(case: Case, device: torch.device) -> list[Tensor]:
    """Copies of one weight that together are several times the L2. Trained weights are spread about like these."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(min(case.out_features * case.in_features, 1 << 22), generator=generator) * 0.02
    values = drawn.repeat(-(-case.out_features * case.in_features // len(drawn)))
    weight = values[: case.out_features * case.in_features].view(case.out_features, case.in_features).bfloat16()
    packed = pack_quietly(weight, case.layout)
    if (found := info(packed).layout) != case.layout:
        raise ValueError(f"{case.out_features} x {case.in_features} weights become {found}, not {case.layout}")
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    first = packed.to(device)
    return [first, *(first.clone() for _ in range(copies_for(first.nbytes, l2_bytes) - 1))]


def replayed(all_products: Callable[[], object], count: int) -> float:
    """Microseconds of one of the `count` products that `all_products` queues, the median of several rounds.

    They run as a CUDA graph, so the host's time isn't in it.
    """
    all_products()  # loads the kernels, which a capture can't
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_products()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ROUNDS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in events) / count


def timer(case: Case, weights: list[Tensor]) -> Callable[[int], float]:
    """What times a way of a product, through all copies of the weight in turn."""
    x = torch.randn(case.tokens, case.in_features, device=weights[0].device).bfloat16()
    layout = ops.LAYOUTS.index(case.layout)

    def time_of(way: int) -> float:
        def all_products() -> None:
            for weight in weights:
                torch.ops.unweight._linear_config(x, weight, layout=layout, tokens=way)

        return replayed(all_products, len(weights))

    return time_of


def measure(cases: Iterable[Case], device: torch.device, tell: Callable[[Case, Entry], None]) -> list[Entry]:
    """Measures all cases, and tells about each. Cases of a weight should follow each other: it is packed once."""
    entries, last, weights = [], None, []
    for case in cases:
        weight = (case.layout, case.out_features, case.in_features)
        if weight != last:
            weights, last = [], None  # freed before the next ones are made
            weights, last = packed_weights(case, device), weight
        entry = fastest(case, timer(case, weights))
        entries.append(entry)
        tell(case, entry)
    return entries
