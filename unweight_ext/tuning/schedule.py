"""How a fused product is shared out to the CTAs: the rule of csrc/cuda/linear/schedule.h and linear.cpp's cut_linear,
for predictions.

Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

BLOCK_ROWS, STAGE_COLUMNS = 64, 128
INVARIANT_TOKENS = 64  # up to here a row's result doesn't depend on the number of rows: each tile is cut by itself


@dataclass(frozen=True)
class Config:
    """An instance of the kernel: csrc/cuda/linear/config.h."""

    tokens: int  # rows of x that it multiplies with at once: of a tile
    warpgroups: int  # that multiply, each with a block of its own

    def __str__(self) -> str:
        return f"{self.tokens} tokens"


@dataclass(frozen=True)
class Matrix:
    """A weight as its work is counted; of a stack of experts, one of them."""

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

    @property
    def cost(self) -> int:
        return self.blocks * self.stages

    @property
    def units(self) -> int:
        return self.blocks * -(-self.stages // self.segment_stages)


@dataclass(frozen=True)
class Unit:
    """A segment of a block, multiplied with a tile of tokens: what is never divided."""

    job: int  # a tile of a weight
    group: int  # of blocks
    segment: int
    block: int  # in its group
    stages: int


@dataclass(frozen=True)
class Round:
    """Segments that a CTA's warpgroups walk together, with the same x."""

    stages: int  # of the segment
    active: int  # warpgroups that have a block


@dataclass(frozen=True)
class GroupShare:
    """What a CTA has of a group of blocks, with one tile of tokens."""

    rounds: tuple[Round, ...]
    late: bool  # others began it and it ends here: it is done behind all other groups
    published: int  # blocks whose sums somebody else adds up
    gathered: tuple[int, ...]  # of each block whose sums it adds up: so many others' pieces

    @property
    def block_stages(self) -> int:
        return sum(r.stages * r.active for r in self.rounds)


@dataclass(frozen=True)
class Share:
    """What one CTA does, in this order."""

    groups: tuple[GroupShare, ...]

    @property
    def rounds(self) -> list[Round]:
        return [r for group in self.groups for r in group.rounds]

    @property
    def block_stages(self) -> int:
        return sum(group.block_stages for group in self.groups)

    @property
    def published(self) -> int:
        return sum(group.published for group in self.groups)

    @property
    def gathered(self) -> int:
        return sum(sum(group.gathered) for group in self.groups)


@dataclass(frozen=True)
class Cut:
    """How the work of a launch is divided."""

    ctas: int
    chunks: int  # of a sheet: what is cut together
    sheets: int
    tiles: int  # of tokens, in a sheet


def tile_chunks(cost: int, segment_stages: int, multiprocessors: int) -> int:
    """Of a sheet that is one tile: as many as have something to do when each gets whole segments."""
    most = segment_stages * -(-cost // (segment_stages * multiprocessors))
    return -(-cost // most)


def chunk_of(cta: int, ctas: int, sheet: int, chunks: int) -> int | None:
    """The chunk of a sheet that a CTA does. Each sheet goes on where the one before stopped."""
    start = sheet * chunks % ctas
    wrapped = max(0, start + chunks - ctas)
    if cta < wrapped:
        return cta
    return cta - start + wrapped if start <= cta < start + chunks - wrapped else None


def cut_of(weights: Sequence[Matrix], tokens: Sequence[int], config: Config, multiprocessors: int) -> Cut:
    """Of x times `weights`. `tokens`: rows of x of each matrix of a weight; several matrices are experts.

    The host, which decides how many CTAs there are, doesn't know which experts have rows.
    """
    every, tile = sum(tokens), config.tokens
    tiles = sum(-(-rows // tile) for rows in tokens)
    most_tiles = every // tile + min(every, len(tokens)) if len(tokens) > 1 else tiles
    if every > INVARIANT_TOKENS:
        ctas = min(multiprocessors, max(1, most_tiles * sum(m.units for m in weights)))
        return Cut(ctas, ctas, 1, tiles)
    least = min(m.segment_stages for m in weights)
    chunks = tile_chunks(sum(m.cost for m in weights), least, multiprocessors)
    return Cut(min(multiprocessors, max(1, chunks * most_tiles)), chunks, tiles, 1)


def units_of(weights: Sequence[Matrix], tiles: int, warpgroups: int) -> Iterator[Unit]:
    """All units of a sheet, in order."""
    for weight, matrix in enumerate(weights):
        for job in range(weight * tiles, (weight + 1) * tiles):
            groups = -(-matrix.blocks // warpgroups)
            for group in range(groups):  # as equal as can be
                blocks = matrix.blocks // groups + (group < matrix.blocks % groups)
                for first in range(0, matrix.stages, matrix.segment_stages):
                    stages = min(matrix.segment_stages, matrix.stages - first)
                    for block in range(blocks):
                        yield Unit(job, group, first // matrix.segment_stages, block, stages)


def borders_of(costs: Sequence[int], chunks: int) -> list[int]:
    """The first unit of each chunk, where its share of the cost begins or the next one behind, whichever is nearer; and
    the end."""
    begins = [0, *accumulate(costs)]
    found = []
    for chunk in range(chunks):
        stage = begins[-1] * chunk // chunks
        at = bisect_right(begins, stage) - 1
        found.append(at + (stage - begins[at] >= costs[at] - costs[at] // 2))
    return [*found, len(costs)]


@lru_cache(maxsize=64)
def chunks_of(weights: tuple[Matrix, ...], tiles: int, warpgroups: int, chunks: int) -> tuple[Share, ...]:
    """What the chunks of one sheet have, in the order in which a CTA goes about it."""
    units = list(units_of(weights, tiles, warpgroups))
    parts = list(pairwise(borders_of([unit.stages for unit in units], chunks)))
    owners: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # chunks that have segments of a block, in order
    for chunk, (begin, end) in enumerate(parts):
        for block in dict.fromkeys((u.job, u.group, u.block) for u in units[begin:end]):
            owners[block].append(chunk)
    shares = []
    for chunk, (begin, end) in enumerate(parts):
        groups = []
        for key, members in groupby(range(begin, end), key=lambda i: (units[i].job, units[i].group)):
            of_group = list(members)
            rounds = []
            for _, together in groupby(of_group, key=lambda i: units[i].segment):
                of_round = list(together)
                rounds.append(Round(units[of_round[0]].stages, len(of_round)))
            blocks = dict.fromkeys(units[i].block for i in of_group)
            cut = [found for found in (owners[(*key, block)] for block in blocks) if len(found) > 1]
            published = sum(found[-1] != chunk for found in cut)
            gathered = tuple(len(found) - 1 for found in cut if found[-1] == chunk)
            before, behind = of_group[0] - 1, of_group[-1] + 1
            is_cut = before >= 0 and (units[before].job, units[before].group) == key
            ends = behind == len(units) or (units[behind].job, units[behind].group) != key
            groups.append(GroupShare(tuple(rounds), is_cut and ends, published, gathered))
        shares.append(Share(tuple(sorted(groups, key=lambda g: g.late))))
    return tuple(shares)


def shares_of(weights: tuple[Matrix, ...], tokens: Sequence[int], config: Config, multiprocessors: int) -> list[Share]:
    """One share for each CTA, some of them perhaps without work; as `cut_of`."""
    if not sum(tokens):
        return []
    cut = cut_of(weights, tokens, config, multiprocessors)
    parts = chunks_of(weights, cut.tiles, config.warpgroups, cut.chunks)
    shares = []
    for cta in range(cut.ctas):
        chunks = (chunk_of(cta, cut.ctas, sheet, cut.chunks) for sheet in range(cut.sheets))
        groups = [group for c in chunks if c is not None for group in parts[c].groups]
        shares.append(Share(tuple(sorted(groups, key=lambda g: g.late))))
    return shares
