"""How the fused product's work is dealt out: every unit once, in order, in equal parts."""

from __future__ import annotations

import math

import linear_reference as stepped
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from native_module import native

MOST_WARPGROUPS = 4


@st.composite
def works(draw):
    """(shapes, tiles, ctas, warpgroups): weights of one launch have the same in_features."""
    warpgroups = draw(st.integers(1, MOST_WARPGROUPS))
    stages, segment = draw(st.integers(1, 200)), draw(st.integers(1, 32))
    blocks = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    shapes = [native.WorkShape(count, stages, segment, warpgroups) for count in blocks]
    return shapes, blocks, draw(st.integers(1, 6)), draw(st.integers(1, 140)), warpgroups


def in_order(parts: list) -> list:
    return sorted(parts, key=lambda part: (part.weight, part.tile, part.first_block))


@given(works())
def test_every_unit_is_done_once_in_order_and_in_equal_parts(work) -> None:
    shapes, blocks, tiles, ctas, warpgroups = work
    wanted = [
        (w, tile, int(group[0]), unit)
        for w, shape in enumerate(shapes)
        for tile in range(tiles)
        for group in np.array_split(np.arange(blocks[w]), -(-blocks[w] // warpgroups))
        for unit in range(len(group) * shape.segments())
    ]
    parts = [in_order(native.linear_parts(cta, ctas, shapes, tiles)) for cta in range(ctas)]
    assert [(p.weight, p.tile, p.first_block, u) for cta in parts for p in cta for u in range(*p.units)] == wanted

    average = sum(tiles * shape.cost() for shape in shapes) / ctas
    longest = max(shape.stages_of(0) for shape in shapes)
    for cta in parts:
        cost = sum(shapes[p.weight].stages_of(u // p.width) for p in cta for u in range(*p.units))
        assert cost <= average + longest
        # Only the first and the last group of a chunk may be cut.
        for part in cta[1:-1]:
            assert part.units == (0, part.width * shapes[part.weight].segments())


@given(works())
def test_pieces_of_a_block_join(work) -> None:
    """Block by block, what the CTAs do of its segments begins with 0, goes on where it stopped, and ends with the last;
    and a CTA that has a part of a group in the middle has nothing before it."""
    shapes, blocks, tiles, ctas, _ = work
    done = {(w, tile, b): 0 for w in range(len(shapes)) for tile in range(tiles) for b in range(blocks[w])}
    for cta in range(ctas):
        for place, part in enumerate(in_order(native.linear_parts(cta, ctas, shapes, tiles))):
            assert place == 0 or part.units[0] == 0
            first, end = part.rounds
            for b in range(MOST_WARPGROUPS):
                begin, stop = part.segments(b)
                if b >= part.width:
                    assert begin == stop == 0
                    continue
                mine = [u // part.width for u in range(*part.units) if u % part.width == b]
                assert list(range(begin, stop)) == mine
                if mine:
                    key = part.weight, part.tile, part.first_block + b
                    assert done[key] == begin and first <= begin < stop <= end
                    done[key] = stop
    assert all(done[w, tile, b] == shapes[w].segments() for w, tile, b in done)


@given(works())
def test_what_a_cta_adds_up_comes_behind_what_others_wait_for(work) -> None:
    """And it leaves pieces of one group at most: there is room for one."""
    shapes, _, tiles, ctas, _ = work
    for cta in range(ctas):
        parts = native.linear_parts(cta, ctas, shapes, tiles)
        sizes = [part.width * shapes[part.weight].segments() for part in parts]
        left = [part for part, size in zip(parts, sizes, strict=True) if part.units[1] < size]
        begun = [part for part in parts if part.units[0]]
        assert len(left) <= 1 and len(begun) <= 1
        for part in begun:
            assert part is parts[-1] and (part in left) <= (len(parts) == 1)


@given(st.integers(1, 200), st.integers(1, 64), st.data())
def test_every_chunk_of_every_sheet_is_one_cta_s_in_order(ctas: int, sheets: int, data) -> None:
    chunks = data.draw(st.integers(1, ctas))
    counts = [0] * ctas
    for sheet in range(sheets):
        found = [(cta, native.chunk_of(cta, ctas, sheet, chunks)) for cta in range(ctas)]
        done = [(cta, chunk) for cta, chunk in found if chunk is not None]
        assert [chunk for _, chunk in done] == list(range(chunks)), "who waits, waits for CTAs before it"
        for cta, _ in done:
            counts[cta] += 1
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 100_000), st.integers(8, 32), st.integers(1, 200))
def test_chunks_of_a_tile(cost: int, segment: int, multiprocessors: int) -> None:
    chunks = native.tile_chunks(cost, segment, multiprocessors)
    assert 1 <= chunks <= multiprocessors and chunks == stepped.chunks_of_tile(cost, segment, multiprocessors)
    most, least = math.ceil(cost / chunks), math.ceil(cost / multiprocessors)
    assert math.ceil(most / segment) == math.ceil(least / segment), "no chunk has more segments for that"
