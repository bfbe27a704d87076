"""Times of every kernel with a cold L2, and of what torch does in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING

from .cold import copies_for, l2_bytes, measure, results_kept
from .exact import LAYOUTS
from .record import ROOT
from .step import Step

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((4096, 4096), (14336, 4096), (28672, 8192))
TABLE = (32064, 4096)  # of an embedding
IDS = (16, 4096)
TOKENS = (1, 16, 64, 4096)
TRANSCODES = (("archive", "huffman"), ("huffman", "nibble"))

KERNELS = (
    *(f"unpack {layout} {n}x{k}" for n, k in SHAPES for layout in LAYOUTS),
    *(f"verify {layout} {n}x{k}" for n, k in SHAPES[1:2] for layout in LAYOUTS),
    *(f"embedding {layout} {TABLE[0]}x{TABLE[1]} {ids}" for layout in LAYOUTS for ids in IDS),
    *(f"transcode {a}-{b} {n}x{k}" for n, k in SHAPES[:2] for a, b in TRANSCODES),
)
PEERS = (
    *(f"copy {n}x{k}" for n, k in SHAPES),
    *(f"matmul {n}x{k} {tokens}" for n, k in SHAPES[:2] for tokens in TOKENS),
    *(f"embedding torch {TABLE[0]}x{TABLE[1]} {ids}" for ids in IDS),
)


def parse_shape(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)


@lru_cache(maxsize=1)
def weights_like_trained(n: int, k: int) -> Tensor:
    """bfloat16 [n, k] on the CPU: a Student t with five degrees of freedom, which real exponents are close to.

    At most 2^24 of them are drawn; larger matrices repeat them.
    """
    import torch

    drawn = min(n * k, 1 << 24)
    generator = torch.Generator().manual_seed(0)
    normal = torch.empty(drawn)
    squares = torch.zeros(drawn)
    for _ in range(5):
        squares += normal.normal_(generator=generator).square_()
    values = (normal.normal_(generator=generator) * 0.02 / (squares / 5).sqrt()).bfloat16()
    return values.repeat(-(-n * k // drawn))[: n * k].view(n, k)


def _pack(n: int, k: int, layout: str, device: str) -> Tensor:
    from unweight_ext.packed import info, pack_quietly

    packed = pack_quietly(weights_like_trained(n, k), layout)
    if info(packed).layout != layout:
        raise RuntimeError(f"these weights became {info(packed).layout}, not {layout}")
    return packed.to(device)


def _many(tensor: Tensor, device: str) -> list[Tensor]:
    """The tensor and copies of it, which together are several times the L2."""
    return [tensor, *(tensor.clone() for _ in range(copies_for(tensor.nbytes, l2_bytes(device)) - 1))]


def _packed_call(unit: str, device: str) -> tuple[Callable[[int], object], dict]:
    """What is timed, and what the report has to know of it."""
    import torch

    import unweight_ext.ops  # noqa: F401 (registers the operators)

    verb, layout, shape, *rest = unit.split(" ")
    n, k = parse_shape(shape)
    source = layout.split("-")[0]
    first = _pack(n, k, source, device)
    about = {"weights": n * k, "packed_bytes": first.nbytes, "bits_per_weight": 8 * first.nbytes / (n * k)}
    operators = torch.ops.unweight
    if verb == "embedding":
        table, ids = first, _ids(int(rest[0]), n, device)
        about.update(rows=int(rest[0]), in_features=k)
        return lambda turn: operators.embedding(ids[turn % len(ids)], table, k), about
    packed = _many(first, device)
    about["buffers"] = len(packed)
    if verb == "unpack":
        return lambda turn: operators.unpack(packed[turn % len(packed)], k, torch.bfloat16), about
    if verb == "verify":
        return lambda turn: operators._verify(packed[turn % len(packed)]), about
    target = LAYOUTS.index(layout.split("-")[1])
    return lambda turn: operators._transcode(packed[turn % len(packed)], target, 0), about


def _ids(count: int, rows: int, device: str) -> list[Tensor]:
    """Other rows at each turn: the table is larger than the cache, and what one turn reads is not read by the next."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(rows, generator=generator)
    return [piece.to(device) for piece in shuffled[: rows // count * count].view(-1, count)[:64]]


def run(unit: str, device: str) -> dict:
    """Times one kernel's operator."""
    sys.path.insert(0, str(ROOT))
    call, about = _packed_call(unit, device)
    written = _bytes_written(unit, about)
    return {**about, **asdict(measure(call, device, keep=results_kept(written, l2_bytes(device))))}


def _bytes_written(unit: str, about: dict) -> int:
    """About what a call's result takes."""
    verb = unit.split(" ")[0]
    written = {"unpack": 2 * about["weights"], "verify": 8, "transcode": about["packed_bytes"]}
    return written[verb] if verb in written else 2 * about["rows"] * about["in_features"]


def run_peer(unit: str, device: str) -> dict:
    """Times what torch does with plain BF16 weights."""
    import torch
    from torch.nn import functional

    verb, *parts = unit.split(" ")
    n, k = parse_shape(parts[1] if verb == "embedding" else parts[0])
    weight = weights_like_trained(n, k).to(device)
    about: dict = {"weights": n * k, "bytes": weight.nbytes}
    if verb == "embedding":
        ids = _ids(int(parts[2]), n, device)
        about.update(rows=int(parts[2]), in_features=k)
        written = 2 * about["rows"] * k

        def call(turn: int) -> Tensor:
            return functional.embedding(ids[turn % len(ids)], weight)

    elif verb == "copy":
        plain, written = _many(weight, device), weight.nbytes

        def call(turn: int) -> Tensor:
            return plain[turn % len(plain)].clone()

    else:
        plain, about["tokens"] = _many(weight, device), int(parts[1])
        written = 2 * about["tokens"] * n
        x = torch.randn(about["tokens"], k, device=device).bfloat16()

        def call(turn: int) -> Tensor:
            return functional.linear(x, plain[turn % len(plain)])

    return {**about, **asdict(measure(call, device, keep=results_kept(written, l2_bytes(device))))}


STEP = Step("timing", "every kernel with a cold L2", KERNELS, run, 120, 45, needs=("build",))
PEER_STEP = Step("peers", "torch's copy, embedding and product with BF16 weights", PEERS, run_peer, 60, 45)
