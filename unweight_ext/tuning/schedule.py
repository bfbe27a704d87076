"""How a fused product is shared out to the CTAs: the rule of csrc/cuda/linear/schedule.h, for predictions.

Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

BLOCK_ROWS, STAGE_COLUMNS = 64, 128


@dataclass(frozen=True)
class Matrix:
    """One matrix that is multiplied, an expert for one."""

    out_features: int
    in_features: int
    segment_stages: int

    @property
    def blocks(self) -> int:
        return -(-self.out_features // BLOCK_ROWS)

    @property
    def stages(self) -> int:
        """Of a block."""
        return -(-self.in_features // STAGE_COLUMNS)


@dataclass(frozen=True)
class Unit:
    """A segment of a block, multiplied with a tile of tokens: what is never divided."""

    tile: int  # one number for each matrix and tile of tokens
    group: int
    segment: int
    block: int  # in its group
    stages: int


@dataclass(frozen=True)
class Round:
    """Segments that a CTA's warpgroups walk together, with the same x."""

    stages: int  # of the segment
    active: int  # warpgroups that have a block


@dataclass(frozen=True)
class Share:
    """What one CTA does."""

    rounds: tuple[Round, ...]
    pieces: int  # blocks that it leaves partial sums of

    @property
    def block_stages(self) -> int:
        return sum(r.stages * r.active for r in self.rounds)


def units_of(matrices: Sequence[tuple[Matrix, int]], warpgroups: int) -> Iterator[Unit]:
    """All units in order. `matrices`: each with its number of token tiles; one without tokens has none."""
    tile = 0
    for matrix, tiles in matrices:
        for _ in range(tiles):
            for group in range(-(-matrix.blocks // warpgroups)):
                blocks = min(warpgroups, matrix.blocks - group * warpgroups)
                for first in range(0, matrix.stages, matrix.segment_stages):
                    stages = min(matrix.segment_stages, matrix.stages - first)
                    for block in range(blocks):
                        yield Unit(tile, group, first // matrix.segment_stages, block, stages)
            tile += 1


def borders_of(costs: Sequence[int], ctas: int) -> list[int]:
    """The first unit of each CTA, where its share of the cost begins or the next one behind, whichever is nearer; and
    the end."""
    begins = [0, *accumulate(costs)]
    found = []
    for cta in range(ctas):
        stage = begins[-1] * cta // ctas
        at = bisect_right(begins, stage) - 1
        found.append(at + (stage - begins[at] >= costs[at] - costs[at] // 2))
    return [*found, len(costs)]


@lru_cache(maxsize=256)
def shares_of(matrices: tuple[tuple[Matrix, int], ...], warpgroups: int, multiprocessors: int) -> tuple[Share, ...]:
    """One share for each CTA: at most one a multiprocessor, and none without work."""
    units = list(units_of(matrices, warpgroups))
    if not units:
        return ()
    borders = borders_of([unit.stages for unit in units], min(multiprocessors, len(units)))
    stages_of_block: dict[tuple[int, int, int], int] = {}
    for unit in units:
        block = (unit.tile, unit.group, unit.block)
        stages_of_block[block] = stages_of_block.get(block, 0) + unit.stages
    shares = []
    for begin, end in pairwise(borders):
        rounds, here = [], {}
        for _, members in groupby(units[begin:end], key=lambda u: (u.tile, u.group, u.segment)):
            together = list(members)
            rounds.append(Round(together[0].stages, len(together)))
            for unit in together:
                block = (unit.tile, unit.group, unit.block)
                here[block] = here.get(block, 0) + unit.stages
        pieces = sum(stages < stages_of_block[block] for block, stages in here.items())
        shares.append(Share(tuple(rounds), pieces))
    return tuple(shares)
