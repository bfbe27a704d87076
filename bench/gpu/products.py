"""Products with packed weights: right in every configuration and way of calling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from .record import ROOT
from .step import NotRun, Step

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("raw", "huffman", "nibble")
CONFIGS = (8, 16, 32, 64, 128, 256)
SHAPE = (1000, 2120)  # neither fills its last block or stage
ROWS = (1, 7, 8, 9, 16, 33, 64, 65, 128, 200, 256, 300, 2100)
# Sums in FP32 against sums in FP64, for each element of sum(|x| * |w|). BF16 results are off by half a unit more.
FLOAT_ERROR, BF16_ERROR = 2**-14, 2**-8

CHECKS = (
    *(f"config {layout} {tokens}" for layout in LAYOUTS for tokens in CONFIGS),
    *(f"{verb} {layout}" for layout in LAYOUTS for verb in ("rows", "strided", "invariant", "experts", "many", "hint")),
    *(f"{verb} {layout}" for layout in LAYOUTS for verb in ("graph", "streams", "repeated", "tuned")),
)


@lru_cache(maxsize=8)
def plain_weight(n: int, k: int, seed: int = 0) -> Tensor:
    from .timing import weights_like_trained

    return weights_like_trained(n, k).roll(seed * 977)


@lru_cache(maxsize=8)
def packed_weight(layout: str, n: int, k: int, device: str, seed: int = 0) -> Tensor:
    from unweight_ext.packed import info, pack_quietly

    packed = pack_quietly(plain_weight(n, k, seed), layout)
    if info(packed).layout != layout:
        raise RuntimeError(f"these weights became {info(packed).layout}, not {layout}")
    return packed.to(device)


def random_x(rows: int, columns: int, device: str, seed: int = 0) -> Tensor:
    import torch

    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def difference(y: Tensor, x: Tensor, weight: Tensor) -> str:
    """Where a product is further from the exact one than its sums may be; empty if nowhere. On the CPU, in FP64."""
    import torch

    rounded = y.dtype != torch.float32
    y, x, weight = y.cpu().double(), x.cpu().double(), weight.cpu().double()
    exact, scale = x @ weight.T, x.abs() @ weight.abs().T
    allowed = FLOAT_ERROR * scale + (BF16_ERROR * exact.abs() if rounded else 0)
    wrong = ~((y - exact).abs() <= allowed)
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {y.numel()} results are off, first {at}: {y[at]:.6g}, expected {exact[at]:.6g}"


def _same(a: Tensor, b: Tensor, what: str) -> str:
    import torch

    return "" if torch.equal(a, b) else f"{what}: {int((a != b).sum())} of {a.numel()} results differ"


def operators() -> object:
    import torch

    import unweight_ext.ops  # noqa: F401 (registers the operators)

    return torch.ops.unweight


def check_config(layout: str, device: str, tokens: str) -> str:
    """An instance with fewer rows than it takes, as many, and more; with a bias too, in both types."""
    if device != "cuda":
        raise NotRun("a CPU has no configurations")
    n, k = SHAPE
    packed = packed_weight(layout, n, k, device)
    import torch

    for rows in (max(1, int(tokens) - 3), int(tokens), 2 * int(tokens) + 1):
        x = random_x(rows, k, device)
        for dtype in (torch.bfloat16, torch.float32):
            for known in (LAYOUTS.index(layout), -1):
                y = operators()._linear_config(x, packed, layout=known, tokens=int(tokens), out_dtype=dtype)
                if found := difference(y, x, plain_weight(n, k)):
                    return f"{rows} rows, {dtype}, layout={known}: {found}"
    return ""


def check_rows(layout: str, device: str) -> str:
    n, k = SHAPE
    for rows in ROWS:
        x = random_x(rows, k, device)
        y = operators().linear(x, packed_weight(layout, n, k, device), layout=LAYOUTS.index(layout))
        if found := difference(y, x, plain_weight(n, k)):
            return f"{rows} rows: {found}"
    return ""


def check_strided(layout: str, device: str) -> str:
    """Rows apart from each other, at odd places, and transposed: the same bits as when they are copied together."""
    n, k = SHAPE
    packed, wide = packed_weight(layout, n, k, device), random_x(20, k + 40, device)
    for name, x in {"apart": wide[:, 8 : k + 8], "odd": wide[:, 3 : k + 3], "every second": wide[::2, :k]}.items():
        y = operators().linear(x, packed)
        if found := _same(y, operators().linear(x.contiguous(), packed), name) or difference(y, x, plain_weight(n, k)):
            return found
    return ""


def check_invariant(layout: str, device: str) -> str:
    """A row gives the same bits alone and among up to 64, whoever they are."""
    n, k = SHAPE
    packed, x = packed_weight(layout, n, k, device), random_x(64, k, device)
    alone = operators().linear(x[5:6], packed)
    for rows in (6, 8, 9, 16, 17, 32, 33, 64):
        if found := _same(operators().linear(x[:rows], packed)[5:6], alone, f"{rows} rows"):
            return found
    return _same(operators().linear(x.flip(0), packed)[58:59], alone, "other companions")


def check_experts(layout: str, device: str) -> str:
    """Some experts without rows, and rows behind the last expert's, which give zeros."""
    import torch

    from unweight_ext.packed import pack_quietly

    experts, n, k, rows = 5, 200, 640, 70
    weights = torch.stack([plain_weight(n, k, seed) for seed in range(experts)])
    packed, x = pack_quietly(weights, layout, stacked=True).to(device), random_x(rows, k, device)
    ends = [7, 7, 40, 41, 65]
    y = operators().grouped_linear(x, packed, torch.tensor(ends, dtype=torch.int32, device=device))
    for begin, end, weight in zip([0, *ends], ends, weights, strict=False):
        if end > begin and (found := difference(y[begin:end], x[begin:end], weight)):
            return f"rows {begin}-{end}: {found}"
    return "" if not y[65:].any() else "rows behind the last expert's aren't zeros"


def check_many(layout: str, device: str) -> str:
    """Weights of other sizes and layouts in one call."""
    k = SHAPE[1]
    sizes, layouts = (1000, 130, 64), (layout, "raw", layout)
    packed = [packed_weight(name, n, k, device) for n, name in zip(sizes, layouts, strict=True)]
    x = random_x(19, k, device)
    results = operators().linear_many(x, packed, [None] * 3, layouts=[LAYOUTS.index(name) for name in layouts])
    for n, y in zip(sizes, results, strict=True):
        if found := difference(y, x, plain_weight(n, k)):
            return f"{n} outputs: {found}"
    return ""


def check_hint(layout: str, device: str) -> str:
    """Products that ask for the next weight's first stages give the same bits, whatever that weight is."""
    import torch

    n, k = SHAPE
    packed, x = packed_weight(layout, n, k, device), random_x(9, k, device)
    plain = operators().linear(x, packed)
    random = torch.randint(0, 256, (3, 4096), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for name in LAYOUTS:
        for following in (packed_weight(name, 3000, 640, device), packed[:1], random.to(device)):
            if found := _same(operators().linear(x, packed, None, following), plain, f"{name} comes next"):
                return found
    return ""


def check_graph(layout: str, device: str) -> str:
    """A captured product follows what lies in x when it is replayed."""
    import torch

    if device != "cuda":
        raise NotRun("a CPU has no graphs")
    n, k = SHAPE
    packed, x = packed_weight(layout, n, k, device), random_x(16, k, device)
    operators().linear(x, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operators().linear(x, packed)
    for seed in range(1, 4):
        x.copy_(random_x(16, k, device, seed))
        graph.replay()
        if found := _same(y, operators().linear(x, packed), f"replay {seed}"):
            return found
    return ""


def check_streams(layout: str, device: str) -> str:
    """Products on two streams at once, each many times."""
    import torch

    if device != "cuda":
        raise NotRun("a CPU has no streams")
    n, k = SHAPE
    packed, xs = packed_weight(layout, n, k, device), [random_x(rows, k, device) for rows in (16, 300)]
    expected = [operators().linear(x, packed) for x in xs]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in xs], [[], []]
    for _ in range(50):
        for at, (stream, x) in enumerate(zip(streams, xs, strict=True)):
            with torch.cuda.stream(stream):
                results[at].append(operators().linear(x, packed))
    torch.cuda.synchronize()
    found = (_same(y, want, "two streams") for want, ys in zip(expected, results, strict=True) for y in ys)
    return next(filter(None, found), "")


def check_repeated(layout: str, device: str) -> str:
    """The same bits each time: nothing depends on who was faster. Launches follow each other at once."""
    n, k = SHAPE
    packed = packed_weight(layout, n, k, device)
    for rows in (1, 64, 256):
        x = random_x(rows, k, device)
        results = [operators().linear(x, packed) for _ in range(30 if device == "cuda" else 2)]
        if found := next(filter(None, (_same(y, results[0], f"{rows} rows") for y in results)), ""):
            return found
    return ""


def check_tuned(layout: str, device: str) -> str:
    """What `unweight tune` measures is a table that operators follow, and that changes no result up to 64 rows."""
    import torch

    from unweight_ext.tuning.measure import Case, measure
    from unweight_ext.tuning.table import Table, apply, forget_tuned

    if device != "cuda":
        raise NotRun("a CPU has nothing to tune")
    n, k = SHAPE
    packed, x, gpu = packed_weight(layout, n, k, device), random_x(16, k, device), torch.cuda.get_device_name()
    before = operators().linear(x, packed, layout=LAYOUTS.index(layout))
    cases = [Case(layout, n, k, tokens) for tokens in (16, 512)]
    entries = measure(cases, torch.device("cuda"), lambda case, entry: print(case, entry))
    apply(Table(gpu, tuple(entries)))
    try:
        found = _same(operators().linear(x, packed, layout=LAYOUTS.index(layout)), before, "with a table")
        rows = random_x(500, k, device)
        return found or difference(
            operators().linear(rows, packed, layout=LAYOUTS.index(layout)), rows, plain_weight(n, k)
        )
    finally:
        forget_tuned(gpu)


def run_check(unit: str, device: str) -> dict:
    """Raises AssertionError that says what is wrong."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    verb, layout, *rest = unit.split(" ")
    check: Callable[..., str] = globals()[f"check_{verb}"]
    if found := check(layout, device, *rest):
        raise AssertionError(found)
    return {"cases": 1}


STEP = Step("products", "products against sums in FP64, in all ways of calling", CHECKS, run_check, 90, 30, ("build",))
