"""Every kernel bit for bit against the CPU codec: contents made to hurt, shapes at all edges, stacks, damage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from .record import ROOT
from .step import NotRun, Step

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("raw", "huffman", "nibble", "archive")
# What loaders do, and what a change of mind would; a GPU has no use for archive as a target.
TRANSCODES = tuple((a, b) for a in LAYOUTS for b in ("raw", "huffman", "nibble") if a != b)
STACKS = ((2, 64, 128), (3, 65, 1030))
LARGE = ((4096, 4096), (1000, 11008))
LARGE_CONTENTS = ("trained", "few outsiders")
HOSTILE_TURNS = 8
SHOWN = 3  # failures in a reason; all are counted

UNITS = (
    *(f"unpack {layout}" for layout in LAYOUTS),
    *(f"embedding {layout}" for layout in LAYOUTS),
    *(f"transcode {a} to {b}" for a, b in TRANSCODES),
    *(f"verify {layout}" for layout in LAYOUTS),
    *(f"hostile {layout}" for layout in LAYOUTS),
    *(f"product {layout}" for layout in LAYOUTS),
    *(f"graph {layout}" for layout in LAYOUTS),
    *(f"large {layout}" for layout in LAYOUTS),
    "large transcode",
)


@dataclass(frozen=True)
class Case:
    content: str
    shape: tuple[int, ...]

    @lru_cache(maxsize=1024)  # noqa: B019 (a case is two values)
    def weight(self) -> Tensor:
        """bfloat16 of `shape`, on the CPU."""
        import torch
        from samples import weight

        if len(self.shape) == 2:
            return weight(self.content, *self.shape)
        return torch.stack([weight(self.content, *self.shape[1:], seed=e) for e in range(self.shape[0])])

    @lru_cache(maxsize=1024)  # noqa: B019
    def packed(self, layout: str) -> Tensor:
        """Maybe in the layout that `pack` falls back to."""
        from unweight_ext.packed import pack_quietly

        return pack_quietly(self.weight(), layout, stacked=len(self.shape) == 3)

    def __str__(self) -> str:
        return f"{self.content} {'x'.join(map(str, self.shape))}"


def cases(large: bool = False) -> Iterator[Case]:
    from samples import CONTENTS, SHAPES

    if large:
        yield from (Case(content, shape) for content in LARGE_CONTENTS for shape in LARGE)
    else:
        yield from (Case(content, shape) for content in CONTENTS for shape in (*SHAPES, *STACKS))


def _bf16_difference(got: Tensor, expected: Tensor) -> str:
    """Where two BF16 tensors differ first, NaN payloads and the signs of zeros included; empty if nowhere."""
    import torch

    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
    number = torch.int16 if expected.dtype == torch.bfloat16 else expected.dtype
    got, expected = got.cpu().view(number).flatten(), expected.view(number).flatten()
    different = (got != expected).nonzero()
    if not len(different):
        return ""
    at = int(different[0])
    values = f"{int(got[at]) & 0xFFFF:#06x}, expected {int(expected[at]) & 0xFFFF:#06x}"
    return f"{len(different)} of {expected.numel()} elements differ, first {at}: {values}"


def check_unpack(case: Case, layout: str, device: str) -> str:
    import torch

    weight = case.weight()
    packed = case.packed(layout).to(device)
    got = torch.ops.unweight.unpack(packed, weight.shape[-1], torch.bfloat16)
    return _bf16_difference(got, weight)


def check_embedding(case: Case, layout: str, device: str) -> str | None:
    """Rows in any order, twice too, with both types of ids; on a GPU an id without a row gives NaN."""
    import torch

    if len(case.shape) == 3:
        return None  # an embedding is one matrix
    weight = case.weight()
    n, k = weight.shape
    packed = case.packed(layout).to(device)
    ids = torch.cat([torch.arange(n - 1, -1, -1), torch.tensor([0, n - 1, n // 2])])
    for dtype in (torch.int64, torch.int32):
        got = torch.ops.unweight.embedding(ids.to(device, dtype), packed, k)
        if found := _bf16_difference(got, weight[ids]):
            return f"{dtype} ids: {found}"
    if device == "cuda":
        got = torch.ops.unweight.embedding(torch.tensor([0, n], device=device), packed, k)
        nan = torch.full((k,), 0x7FFF, dtype=torch.int16).view(torch.bfloat16)
        if found := _bf16_difference(got, torch.stack([weight[0], nan])):
            return f"id {n}: {found}"
    return ""


def check_transcode(case: Case, layouts: tuple[str, str], device: str) -> str:
    """The bytes are those that `pack` writes in the layout that is asked for."""
    import torch

    source, target = layouts
    got = torch.ops.unweight._transcode(case.packed(source).to(device), LAYOUTS.index(target), 0)
    return _bf16_difference(got, case.packed(target))


def check_product(case: Case, layout: str, device: str) -> str | None:
    """An exact product has the bits of torch's own with the plain weight."""
    import torch

    if len(case.shape) == 3 or case.content != "trained":
        return None
    generator = torch.Generator().manual_seed(0)
    n, k = case.shape
    x, bias = torch.randn(5, k, generator=generator).bfloat16(), torch.randn(n, generator=generator).bfloat16()
    x, bias = x.to(device), bias.to(device)
    got = torch.ops.unweight.linear(x, case.packed(layout).to(device), bias, exact=True)
    return _bf16_difference(got, torch.nn.functional.linear(x, case.weight().to(device), bias).cpu())


def check_graph(case: Case, layout: str, device: str) -> str | None:
    """A captured lookup gives the rows of the ids that are there when it is replayed."""
    import torch

    if device != "cuda":
        raise NotRun("a CPU has no graphs")
    if len(case.shape) == 3:
        return None
    n, k = case.shape
    packed, ids = case.packed(layout).to(device), torch.zeros(8, dtype=torch.int64, device=device)
    torch.ops.unweight.embedding(ids, packed, k)  # loads the kernels, which a capture can't
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.ops.unweight.embedding(ids, packed, k)
    for turn in range(2):
        wanted = (torch.arange(8) * (turn + 3) + turn) % n
        ids.copy_(wanted)
        graph.replay()
        if found := _bf16_difference(got, case.weight()[wanted]):
            return f"replay {turn}: {found}"
    return ""


def check_hostile(case: Case, layout: str, device: str) -> str:
    """Damaged bytes under checksums that are right: a device refuses what a CPU refuses, and else unpacks the same.

    Where codes run on past the words that are there, a decoder may find anything, so only layouts without codes have
    to give the same weights then.
    """
    import numpy as np
    import torch
    from reference_cases import seal

    def outcome(packed: Tensor) -> Tensor | str:
        try:
            return torch.ops.unweight.unpack(packed, case.shape[-1], torch.bfloat16)
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    rng = np.random.default_rng(case.shape[0] + len(case.content))
    for turn in range(HOSTILE_TURNS):
        damaged = case.packed(layout).numpy().copy()
        matrix = damaged.reshape(-1, *damaged.shape[-2:])[-1].reshape(-1)
        for _ in range(rng.integers(1, 5)):
            matrix[rng.integers(128 if turn % 4 else 0, matrix.size)] ^= 1 << rng.integers(8)
        seal(matrix)
        packed = torch.from_numpy(damaged)
        expected, got = outcome(packed), outcome(packed.to(device))
        if isinstance(got, str) != isinstance(expected, str):
            said = [x if isinstance(x, str) else "nothing" for x in (got, expected)]
            return f"turn {turn}: unpack says {said[0]!r}, a CPU {said[1]!r}"
        if isinstance(got, str):
            if "CUDA" in got:
                return f"turn {turn}: {got}"
        elif LAYOUTS[matrix[10]] in ("raw", "nibble") and (found := _bf16_difference(got, expected)):
            return f"turn {turn}: {found}"
    return ""


def damaged_copies(packed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One flipped bit in each part of the last matrix."""
    import torch

    matrix = packed.view(-1, *packed.shape[-2:])[-1].flatten()
    words = matrix[:128].view(torch.int64)
    index, checksums, data, used = int(words[6]), int(words[7]), int(words[8]), int(words[5])
    start = packed.numel() - matrix.numel()
    # In the data a sign and a mantissa: what describes a stage or chunk has texts of its own, and several can be right.
    plane = data + 24
    places = {"magic": 0, "header": 17, "index": index, "checksums": checksums, "data": plane, "last byte": used - 1}
    for name, place in places.items():
        copy = packed.clone()
        copy.view(-1)[start + place] ^= 1
        yield name, copy


def check_verify(case: Case, layout: str, device: str) -> str:
    """Sound bytes pass, damaged ones raise in `_verify` and in `unpack`, with the text that a CPU raises with."""
    import torch

    packed = case.packed(layout)
    in_features = case.shape[-1]
    torch.ops.unweight._verify(packed.to(device))

    def text_of(call: Callable[[], object]) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    for part, damaged in damaged_copies(packed):
        expected = text_of(lambda d=damaged: torch.ops.unweight._verify(d))
        if not expected:
            return f"damaged {part}: the CPU says nothing"
        moved = damaged.to(device)
        if (got := text_of(lambda d=moved: torch.ops.unweight._verify(d))) != expected:
            return f"damaged {part}: verify says {got!r}, expected {expected!r}"
        if not text_of(lambda d=moved: torch.ops.unweight.unpack(d, in_features, torch.bfloat16)):
            return f"damaged {part}: unpack says nothing"
    return ""


# What a unit's verb means, for one layout.
CHECKS = {
    "unpack": check_unpack,
    "embedding": check_embedding,
    "verify": check_verify,
    "hostile": check_hostile,
    "product": check_product,
    "graph": check_graph,
}


def checks_of(unit: str) -> Iterator[tuple[Case, Callable[..., str | None]]]:
    """Cases, each with what says of it on a device what is wrong, or None where it is no case."""
    verb, _, rest = unit.partition(" ")
    layouts = tuple(rest.split(" to "))
    if verb == "large" and rest == "transcode":
        checks = [partial(check_transcode, layouts=pair) for pair in (("archive", "huffman"), ("huffman", "nibble"))]
    elif verb == "large":
        checks = [partial(check, layout=rest) for check in (check_unpack, check_embedding, check_verify)]
    elif verb == "transcode":
        checks = [partial(check_transcode, layouts=layouts)]
    else:
        checks = [partial(CHECKS[verb], layout=rest)]
    yield from ((case, check) for case in cases(verb == "large") for check in checks)


def run(unit: str, device: str) -> dict:
    """Counts cases. Raises AssertionError that names the first ones that failed."""
    sys.path.insert(0, str(ROOT / "tests"))
    sys.path.insert(0, str(ROOT))
    import unweight_ext.ops  # noqa: F401 (registers the operators)

    done, failures = 0, []
    for case, check in checks_of(unit):
        try:
            found = check(case, device=device)
        except NotRun:
            raise
        except Exception as error:
            # Of no more use afterwards if it was a fault of the GPU, so the unit ends here.
            raise RuntimeError(f"{case}: {error}") from error
        done += found is not None
        if found:
            failures.append(f"{case}: {found}")
    if failures:
        more = f"; and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
        raise AssertionError(f"{len(failures)} of {done} cases: {'; '.join(failures[:SHOWN])}{more}")
    return {"cases": done}


STEP = Step("exact", "every kernel bit for bit against the CPU codec", UNITS, run, 180, 60, needs=("build",))
