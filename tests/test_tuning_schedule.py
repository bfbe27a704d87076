"""The Python rule of who does what in a fused product is the kernels' own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_module import native

from unweight_ext.tuning.predict import CONFIGS, Config
from unweight_ext.tuning.schedule import Matrix, Round, shares_of

FEATURES = st.integers(1, 3000)
MATRICES = st.builds(Matrix, FEATURES, FEATURES, st.integers(8, 32))


def native_share(cta: int, ctas: int, matrices: list[Matrix], tiles: int, warpgroups: int) -> tuple[list[Round], int]:
    """Rounds and unfinished blocks of a CTA, as csrc/cuda/linear/schedule.h deals them out."""
    shapes = [native.WorkShape(m.blocks, m.stages, m.segment_stages, warpgroups) for m in matrices]
    rounds, pieces = [], 0
    for part in native.linear_parts(cta, ctas, shapes, tiles):
        shape = shapes[part.weight]
        ranges = [part.segments(block) for block in range(part.width)]
        for segment in range(*part.rounds):
            rounds.append(Round(shape.stages_of(segment), sum(begin <= segment < end for begin, end in ranges)))
        pieces += sum(begin < end and end - begin < shape.segments() for begin, end in ranges)
    return rounds, pieces


@given(matrices=st.lists(MATRICES, min_size=1, max_size=3), tiles=st.integers(1, 3), config=st.sampled_from(CONFIGS),
       multiprocessors=st.integers(1, 140))  # fmt: skip
def test_shares_are_the_kernels(matrices: list[Matrix], tiles: int, config: Config, multiprocessors: int) -> None:
    shares = shares_of(tuple((m, tiles) for m in matrices), config.warpgroups, multiprocessors)
    for cta, share in enumerate(shares):
        rounds, pieces = native_share(cta, len(shares), matrices, tiles, config.warpgroups)
        assert (list(share.rounds), share.pieces) == (rounds, pieces)
    assert sum(s.block_stages for s in shares) == tiles * sum(m.blocks * m.stages for m in matrices)


@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
def test_a_real_layer(multiprocessors: int) -> None:
    matrix = Matrix(14336, 4096, 12)
    shares = shares_of(((matrix, 1),), 3, multiprocessors)
    assert len(shares) == multiprocessors
    for cta in (0, multiprocessors // 2, multiprocessors - 1):
        assert native_share(cta, len(shares), [matrix], 1, 3) == (list(shares[cta].rounds), shares[cta].pieces)


def test_no_work_no_shares() -> None:
    assert shares_of(((Matrix(64, 128, 8), 0),), 3, 132) == ()


def test_configs_are_the_kernels() -> None:
    assert [(c.tokens, c.warpgroups) for c in CONFIGS] == native.linear_configs()
