"""What the fused product gives, bit for bit: the arithmetic of its tensor cores step by step, in the order of its sums.

A *chain* is what one warpgroup sums in its registers: consecutive segments of a block of 64 rows. It starts at zero and
takes a k-step of 16 columns at a time; chains are added in FP32, in order, then the bias, and the last step rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ptxsim import wgmma

from unweight_ext import reference

ROWS, STAGE_COLUMNS, NIBBLE_BASE = 64, 128, 112
Chain = tuple[int, int]  # segments [begin, end) of a block


def to_float(bits: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) as float64."""
    with np.errstate(invalid="ignore"):  # NaNs that signal
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest BF16, ties to even; any NaN gives 0x7FFF, as cvt.rn.bf16.f32 does."""
    word = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, nearest).astype(np.uint16)


@dataclass(frozen=True)
class Weights:
    """A matrix as the tensor cores get it: BF16 [N, K] as float64, times 2^scale (nibble's exponents are scaled)."""

    values: np.ndarray
    scale: int
    segment_columns: int

    @property
    def segments(self) -> int:
        return -(-self.values.shape[1] // self.segment_columns)

    @property
    def blocks(self) -> int:
        return -(-self.values.shape[0] // ROWS)


def read_weights(packed: np.ndarray) -> Weights:
    """Of a packed matrix [N, row_bytes]. Zeros, infinities and NaNs aren't scaled."""
    header = reference.parse_header(packed)
    scale = NIBBLE_BASE - header.base if header.layout == "nibble" else 0
    weights = torch.ops.unweight.unpack(torch.from_numpy(packed), header.k, torch.bfloat16)
    values = np.ldexp(to_float(weights.view(torch.int16).numpy().view(np.uint16)), scale)
    return Weights(values, scale, STAGE_COLUMNS * header.segment_stages)


def sum_chain(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float64 [N, K] · [M, K]ᵀ as one chain → float32 [N, M]."""
    sums = np.zeros((len(weights), len(x)), np.float32)
    for k in range(0, weights.shape[1], wgmma.K):
        sums = wgmma.multiply(weights[:, k : k + wgmma.K], x[:, k : k + wgmma.K], sums.astype(np.float64))
    return sums


def multiply(weights: Weights, x: np.ndarray, chains: Sequence[Sequence[Chain]]) -> np.ndarray:
    """Sums before the bias: x is BF16 [M, K] as uint16, chains those of each block in order → float32 [M, N].

    A block's chains are added from the last to the first.
    """
    tokens = to_float(x)
    result = np.zeros((len(weights.values), len(x)), np.float32)
    alike: dict[tuple[Chain, ...], list[int]] = defaultdict(list)
    for block, of_block in enumerate(chains):
        alike[tuple(of_block)].append(block)
    for cut, blocks in alike.items():
        assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])] and cut[-1][1] == weights.segments
        rows = np.concatenate([np.arange(ROWS * b, min(ROWS * b + ROWS, len(result))) for b in blocks])
        parts = []
        for begin, end in cut:
            columns = slice(begin * weights.segment_columns, end * weights.segment_columns)
            parts.append(
                np.ldexp(sum_chain(weights.values[rows, columns], tokens[:, columns]), np.int32(-weights.scale))
            )
        with np.errstate(invalid="ignore", over="ignore"):
            result[rows] = sum(parts[-2::-1], start=parts[-1])
    return np.ascontiguousarray(result.T)


def finish(sums: np.ndarray, bias: np.ndarray | None, float_output: bool) -> np.ndarray:
    """Adds the bias (BF16 [N] as uint16) and rounds → float32 or uint16 [M, N]."""
    if bias is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            sums = sums + to_float(bias).astype(np.float32)
    return sums if float_output else to_bfloat16(sums)


def share_work(costs: Sequence[int], chunks: int) -> list[int]:
    """The chunk of each unit of work: chunk c has those between the borders nearest to c/chunks and (c + 1)/chunks.

    Those fractions are cut to whole stages, and of two borders that are equally near it is the later one.
    """
    sums = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])
    places = [c * int(sums[-1]) // chunks for c in range(1, chunks)]
    borders = [len(costs) - int(np.argmin(abs(sums[::-1] - place))) for place in places]
    return np.searchsorted(borders, np.arange(len(costs)), side="right").tolist()


def chunks_of_tile(cost: int, segment_stages: int, multiprocessors: int) -> int:
    """Of so many stages: as many as are left when each has as many whole segments as the largest needs."""
    segments = math.ceil(cost / (segment_stages * multiprocessors))
    return math.ceil(cost / (segment_stages * segments))


def cut_chains(
    weights: Sequence[Sequence[Weights]],
    ranges: Sequence[tuple[int, int]],
    tokens: int,
    warpgroups: int,
    multiprocessors: int,
    chunks: int | None = None,
) -> dict[tuple[int, int, int, int], list[Chain]]:
    """The chains of each (weight, matrix, first token, block), in order.

    Units of work are a block's segments, in the order weight, matrix, tile of `tokens` rows, group of blocks (as few
    and as equal ones as can be, of at most `warpgroups`), segment, block, and cost their stages. ranges: the rows of x
    of each matrix. All units together are cut to `chunks`; without it those of each tile are cut by themselves, for a
    GPU of so many multiprocessors.
    """
    sheets: dict[tuple[int, int] | None, list[tuple[tuple[int, int, int, int], int, int]]] = defaultdict(list)
    for number, stack in enumerate(weights):
        for matrix, ((begin, end), w) in enumerate(zip(ranges, stack, strict=True)):
            stages, per_segment = -(-w.values.shape[1] // STAGE_COLUMNS), w.segment_columns // STAGE_COLUMNS
            for first in range(begin, end, tokens):
                sheet = sheets[None if chunks else (matrix, first)]
                for group in np.array_split(np.arange(w.blocks), -(-w.blocks // warpgroups)):
                    for segment in range(w.segments):
                        for block in group.tolist():
                            cost = min(per_segment, stages - segment * per_segment)
                            sheet.append(((number, matrix, first, block), segment, cost))
    least = min(w.segment_columns // STAGE_COLUMNS for stack in weights for w in stack)
    chains: dict[tuple[int, int, int, int], list[Chain]] = defaultdict(list)
    for sheet in sheets.values():
        costs = [cost for _, _, cost in sheet]
        owners: dict[tuple[int, int, int, int], int] = {}
        count = chunks or chunks_of_tile(sum(costs), least, multiprocessors)
        for (block, segment, _), chunk in zip(sheet, share_work(costs, count), strict=True):
            if owners.get(block) == chunk:
                chains[block][-1] = (chains[block][-1][0], segment + 1)
            else:
                chains[block].append((segment, segment + 1))
                owners[block] = chunk
    return chains


def one_chain(weights: Weights) -> list[list[Chain]]:
    """Each block summed in one go."""
    return [[(0, weights.segments)]] * weights.blocks
