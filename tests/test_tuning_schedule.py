"""The Python rule of who does what in a fused product is the kernels' own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_module import native

from unweight_ext.reference_tiles import segment_stages
from unweight_ext.tuning.predict import CONFIGS
from unweight_ext.tuning.schedule import (
    INVARIANT_TOKENS,
    Config,
    Matrix,
    Round,
    Share,
    chunk_of,
    chunks_of,
    cut_of,
    shares_of,
    tile_chunks,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.products import FEW, LAYERS, MANY

FEATURES = st.integers(1, 3000)
MATRICES = st.builds(Matrix, FEATURES, FEATURES, st.integers(8, 32))


def matrix_of(out_features: int, in_features: int) -> Matrix:
    return Matrix(out_features, in_features, segment_stages(out_features, in_features))


class NativeChunks:
    """Of one sheet, as csrc/cuda/linear/schedule.h deals it out."""

    def __init__(self, weights: tuple[Matrix, ...], tiles: int, warpgroups: int, chunks: int) -> None:
        self.shapes = [native.WorkShape(m.blocks, m.stages, m.segment_stages, warpgroups) for m in weights]
        self.parts = [native.linear_parts(chunk, chunks, self.shapes, tiles) for chunk in range(chunks)]
        self.owners: dict[tuple[int, ...], list[int]] = {}
        for chunk, parts in enumerate(self.parts):
            for part in parts:
                for block in range(part.width):
                    begin, end = part.segments(block)
                    if begin < end:
                        self.owners.setdefault((part.weight, part.tile, part.first_block, block), []).append(chunk)

    def groups(self, chunk: int) -> list[tuple[list[Round], int, list[int]]]:
        """Of each group: rounds, published blocks, gathered pieces."""
        found = []
        for part in self.parts[chunk]:
            shape = self.shapes[part.weight]
            ranges = [part.segments(block) for block in range(part.width)]
            rounds = [
                Round(shape.stages_of(segment), sum(begin <= segment < end for begin, end in ranges))
                for segment in range(*part.rounds)
            ]
            published, gathered = 0, []
            for block, (begin, end) in enumerate(ranges):
                if begin == end:
                    continue
                others = len(self.owners[part.weight, part.tile, part.first_block, block]) - 1
                if end < shape.segments():
                    published += 1
                elif others:
                    gathered.append(others)
            found.append((rounds, published, sorted(gathered)))
        return found


def groups_of(share: Share) -> list[tuple[list[Round], int, list[int]]]:
    return [(list(group.rounds), group.published, sorted(group.gathered)) for group in share.groups]


@given(weights=st.lists(MATRICES, min_size=1, max_size=3), tiles=st.integers(1, 3), config=st.sampled_from(CONFIGS),
       chunks=st.integers(1, 140))  # fmt: skip
def test_chunks_are_the_kernels(weights: list[Matrix], tiles: int, config: Config, chunks: int) -> None:
    weights = [Matrix(m.out_features, weights[0].in_features, m.segment_stages) for m in weights]
    shares = chunks_of(tuple(weights), tiles, config.warpgroups, chunks)
    expected = NativeChunks(tuple(weights), tiles, config.warpgroups, chunks)
    assert [groups_of(share) for share in shares] == [expected.groups(chunk) for chunk in range(chunks)]
    assert sum(s.block_stages for s in shares) == tiles * sum(m.cost for m in weights)
    assert sum(s.published for s in shares) == sum(s.gathered for s in shares)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.model} {layer.name}")
def test_real_layers(layer) -> None:
    weights = tuple(matrix_of(*shape) for shape in layer.shapes)
    for tokens in (FEW[-1], MANY[0]):
        product = layer.product(tokens)
        config = next(c for c in CONFIGS if c.tokens >= min(max(product.tokens), 256))
        cut = cut_of(weights, product.tokens, config, 132)
        expected = NativeChunks(weights, cut.tiles, config.warpgroups, cut.chunks)
        shares = chunks_of(weights, cut.tiles, config.warpgroups, cut.chunks)
        assert [groups_of(share) for share in shares] == [expected.groups(c) for c in range(cut.chunks)]


@given(shapes=st.lists(st.integers(1, 40_000), min_size=1, max_size=4), in_features=st.integers(1, 40_000),
       tokens=st.lists(st.integers(0, 40), min_size=1, max_size=20), config=st.sampled_from(CONFIGS),
       multiprocessors=st.integers(1, 200))  # fmt: skip
def test_a_launch_is_cut_as_the_driver_cuts_it(
    shapes: list[int], in_features: int, tokens: list[int], config: Config, multiprocessors: int
) -> None:
    experts = len(tokens)
    weights = [
        native.LinearWeight(native.PackedMatrices(1 << 20, 1 << 20, n, in_features, experts), 0, 1 << 21, n)
        for n in shapes
    ]
    offsets = (1 << 22) if experts > 1 else 0
    call = native.LinearCall(weights, sum(tokens), 1 << 23, in_features, offsets, False)
    expected = native.cut_linear(call, native.LinearConfig(config.tokens, config.warpgroups), multiprocessors)
    found = cut_of([matrix_of(n, in_features) for n in shapes], tokens, config, multiprocessors)
    assert (found.ctas, found.chunks) == (expected.ctas, expected.chunks)
    tiles = sum(-(-rows // config.tokens) for rows in tokens)
    assert expected.tile_sheets == (sum(tokens) <= INVARIANT_TOKENS)
    assert (found.sheets, found.tiles) == ((tiles, 1) if expected.tile_sheets else (1, tiles))


@given(cost=st.integers(1, 2**21), segment=st.integers(8, 32), multiprocessors=st.integers(1, 200))
def test_chunks_of_a_tile(cost: int, segment: int, multiprocessors: int) -> None:
    assert tile_chunks(cost, segment, multiprocessors) == native.tile_chunks(cost, segment, multiprocessors)


@given(ctas=st.integers(1, 200), sheets=st.integers(1, 64), data=st.data())
@settings(max_examples=30)
def test_the_chunk_of_a_cta(ctas: int, sheets: int, data) -> None:
    chunks = data.draw(st.integers(1, ctas))
    for sheet in range(sheets):
        for cta in range(ctas):
            assert chunk_of(cta, ctas, sheet, chunks) == native.chunk_of(cta, ctas, sheet, chunks)


def test_sheets_go_on_where_the_one_before_stopped() -> None:
    """Three experts of four have rows: a CTA has its chunks of all their sheets."""
    matrix = matrix_of(4096, 4096)
    shares = shares_of((matrix,), (1, 0, 5, 2), CONFIGS[0], 132)
    one = chunks_of((matrix,), 1, 3, 128)
    assert len(shares) == 132 and sum(share.block_stages for share in shares) == 3 * matrix.cost
    assert shares[0].groups == 3 * one[0].groups
    both = one[125].groups + one[121].groups
    assert shares[125].groups == tuple(sorted(both, key=lambda group: group.late)), "nothing of the second"
    assert shares[131].groups == 2 * one[127].groups, "nothing of the first"
    assert [group.late for group in shares[1].groups] == 3 * [len(one[1].groups) == 0 or one[1].groups[0].late]


def test_no_work_no_shares() -> None:
    assert shares_of((Matrix(64, 128, 8),), (0,), CONFIGS[0], 132) == []


def test_configs_are_the_kernels() -> None:
    assert [(c.tokens, c.warpgroups) for c in CONFIGS] == native.linear_configs()
