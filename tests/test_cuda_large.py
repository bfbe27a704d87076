"""Weights, activations and outputs beyond 2^31 elements and 2^32 bytes: nothing that counts them has 32 bits.

The interpreter would need days for all of it, so only those CTAs run that have the blocks looked at: the first, those
where a count leaves 31 or 32 bits, and the last. The largest matrix that docs/FORMAT.md allows has 2^33 weights, and
2^21 stages.
"""

from __future__ import annotations

from collections import defaultdict

import linear_reference as stepped
import numpy as np
import pytest
import torch
from cuda_reading import ANY, layout_number
from large_matrices import LargeMatrix
from linear_product import assert_same, config, packed, tokens
from native_module import native
from ptxsim import sparse
from ptxsim.device import SimulatedDevice
from reference_cases import assert_same as assert_same_weights

from unweight_ext import reference

BLOCK, STAGE = 64, 128
ROWS, COLUMNS = 3 * 2**20 + 64 + 7, 1024
LAST = ROWS // BLOCK
# Behind 2^31 weights; behind 2^32 bytes of nibble's stages; the last, of 7 rows.
BLOCKS = (0, 2**31 // COLUMNS // BLOCK, 2**32 // (8 * 12304) + 1, LAST)
FAR = 2**30 + 2**10  # elements from row to row: the third row is beyond 2^31


def spread(x: np.ndarray, stride: int) -> np.ndarray:
    """Rows of x, uint16, so many elements apart, as bytes that take no memory between them."""
    rows = sparse.zeros(len(x) * stride, np.uint16)
    rows.reshape(len(x), stride)[:, : x.shape[1]] = x
    return rows.view(np.uint8)


class Cut:
    """How a product of one tile of tokens is dealt out, and which CTAs have a block."""

    def __init__(self, large: LargeMatrix, call: native.LinearCall, size: int, multiprocessors: int) -> None:
        self.warpgroups = config(size).warpgroups
        self.cut = native.cut_linear(call, config(size), multiprocessors)
        segment = native.segment_stages(large.rows, large.columns)
        self.blocks = -(-large.rows // BLOCK)
        self.shape = native.WorkShape(self.blocks, -(-large.columns // STAGE), segment, self.warpgroups)
        self.chains: dict[int, list[stepped.Chain]] = defaultdict(list)
        self.ctas = sorted({chunk for block in large.blocks for chunk in self._chunks(block)})
        for chunk in self.ctas:
            for part in self._parts(chunk):
                for place in range(part.width):
                    begin, end = part.segments(place)
                    if begin < end:
                        self.chains[part.first_block + place].append((begin, end))

    def _parts(self, chunk: int) -> list:
        return native.linear_parts(chunk, self.cut.chunks, [self.shape], 1)

    def _begin(self, chunk: int) -> tuple[int, int]:
        """First block of the group, and unit of it, with which a chunk begins."""
        return min((part.first_block, part.units[0]) for part in self._parts(chunk))

    def _chunks(self, block: int) -> range:
        """Those that have units of the block, and those that they wait for."""
        groups = -(-self.blocks // self.warpgroups)
        width, wide = divmod(self.blocks, groups)
        if block < wide * (width + 1):
            width, place = width + 1, block % (width + 1)
        else:
            place = (block - wide) % width
        begin = block - place
        first = self._chunk_of((begin, place))
        while self.shape.segments() > 1 and self._begin(first)[1] > 0:  # maybe with the rest of other blocks
            first -= 1
        return range(first, self._chunk_of((begin, place + width * (self.shape.segments() - 1))) + 1)

    def _chunk_of(self, unit: tuple[int, int]) -> int:
        """The last chunk that begins with this unit of a group (named by its first block), or before it."""
        low, high = 0, self.cut.chunks - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._begin(middle) <= unit else (low, middle - 1)
        return low


def multiply(
    large: LargeMatrix,
    x: np.ndarray,
    size: int,
    *,
    layout: int,
    multiprocessors: int,
    bias: bool = False,
    stride: int | None = None,
) -> Cut:
    """Runs the CTAs that have the blocks, and compares their rows with the stepped reference. `stride`: of x and y."""
    count, y_stride = len(x), stride or large.rows
    biases = (np.arange(large.rows) % 256 + 0x3F00).astype(np.uint16) if bias else None
    device = SimulatedDevice(multiprocessors, seed=1)
    memory = device.machine.memory
    out = device.allocate(2 * (y_stride * (count - 1) + large.rows), "y")
    weight = native.LinearWeight(
        large.on_device(device, layout), device.tensor(biases, "bias") if bias else 0, out, y_stride
    )
    x_address = memory.adopt(spread(x, stride or large.columns), "x").base
    call = native.LinearCall([weight], count, x_address, stride or large.columns, 0, False)
    cut = Cut(large, call, size, multiprocessors)
    partials = device.allocate(native.partial_bytes(call, config(size), cut.cut), "partials")
    flags = device.allocate_any(native.flag_bytes(call, config(size), cut.cut), "flags")
    (plan,) = native.plan_linear(call, config(size), cut.cut, partials, flags)
    device.run(plan, cut.ctas)
    sums = stepped.multiply(stepped.read_weights(large.small_packed), x, [cut.chains[block] for block in large.blocks])
    for block in large.blocks:
        rows = large.rows_of(block)
        expected = stepped.finish(sums[:, large.small_rows(block)], biases[rows] if bias else None, False)
        for token in range(count):
            got = device.read(out + 2 * (token * y_stride + rows.start), np.uint16, (1, rows.stop - rows.start))
            assert_same(got, expected[token : token + 1], f"block {block}, token {token}")
    return cut


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
def test_product(layout: str) -> None:
    large = LargeMatrix(layout, ROWS, COLUMNS, BLOCKS)
    assert large.begins[LAST] > 2**32
    known = ANY if layout == "raw" else layout_number(layout)
    cut = multiply(large, tokens(3, COLUMNS), 8, layout=known, multiprocessors=1 << 16, bias=True, stride=FAR)
    assert len(cut.ctas) == len(BLOCKS)


def test_product_of_blocks_that_are_shared_out() -> None:
    """Sums of parts beyond 2^31 bytes as well."""
    rows, columns = 2**20 + 7, 2304
    split, last = rows // BLOCK - 2, rows // BLOCK
    large = LargeMatrix("nibble", rows, columns, (split, last))
    cut = multiply(large, tokens(65, columns), 128, layout=layout_number("nibble"), multiprocessors=17_000)
    assert cut.chains[split] == [(0, 1), (1, 2)] and cut.chains[last] == [(0, 2)]
    assert (len(cut.ctas), cut.cut.tile_sheets) == (3, False) and cut.cut.chunks * 4 * 128 * 256 > 2**31


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
def test_product_of_the_largest_matrix(layout: str) -> None:
    """As many rows as can be, 2^33 weights; of raw ones the index leaves 31 bits."""
    rows, columns = 2**27, 64
    large = LargeMatrix(layout, rows, columns, (0, rows // BLOCK - 1))
    assert rows * columns == 2**33 and rows // BLOCK == 2**21
    assert layout != "raw" or large.begins[rows // BLOCK - 1] // 16 > 2**31
    multiply(large, tokens(2, columns), 8, layout=layout_number(layout), multiprocessors=1 << 18)


def test_product_of_experts_far_apart() -> None:
    """2^30 bytes each."""
    rows, columns, size = 70, 200, 2**30
    stack = packed("trained", (6, rows, columns), "nibble")
    data = sparse.zeros(6 * size, np.uint8)
    for place, matrix in enumerate(stack):
        data[place * size :][: matrix.size] = matrix.reshape(-1)
    device = SimulatedDevice(3)
    address = device.machine.memory.adopt(data, "packed").base
    matrices = native.PackedMatrices(address, size, rows, columns, 6, layout=layout_number("nibble"))
    x, out = tokens(4, columns), device.allocate(2 * 4 * rows, "y")
    weight = native.LinearWeight(matrices, 0, out, rows)
    offsets = device.tensor(np.array([1, 1, 2, 2, 3, 4], np.int32), "offsets")
    native.linear(device, native.LinearCall([weight], 4, device.tensor(x, "x"), columns, offsets, False), config(8))
    for token, expert in enumerate((0, 2, 4, 5)):
        w = stepped.read_weights(stack[expert])
        expected = stepped.finish(stepped.multiply(w, x[token : token + 1], stepped.one_chain(w)), None, False)
        assert_same(device.read(out + 2 * token * rows, np.uint16, (1, rows)), expected, f"expert {expert}")


def unit_borders(blocks: int, stages: int, segment: int, warpgroups: int) -> np.ndarray:
    """Stages before each unit of a matrix, and at its end, in the order of units."""
    lengths = np.diff(np.append(np.arange(0, stages, segment), stages))
    groups = -(-blocks // warpgroups)
    width, wide = divmod(blocks, groups)
    units = [np.tile(np.repeat(lengths, width + 1), wide), np.tile(np.repeat(lengths, width), groups - wide)]
    return np.concatenate([[0], np.cumsum(np.concatenate(units))])


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize(
    ("blocks", "stages"), [(2**21, 1), (1, 2**21), (2**15, 64), (1449, 1447), (5, 419_430)], ids=str
)
def test_the_largest_matrices_are_shared_out(blocks: int, stages: int, warpgroups: int) -> None:
    """And four of them, with as many tiles of tokens as a launch can have: borders are where their definition says."""
    assert 0.7 * 2**21 < blocks * stages <= 2**21
    segment, chunks, cost = 8, 132, blocks * stages
    shape = native.WorkShape(blocks, stages, segment, warpgroups)
    borders = unit_borders(blocks, stages, segment, warpgroups)
    assert shape.cost() == cost == borders[-1]
    for weights, tiles in ((1, 1), (4, 1), (4, 2**31 // 128)):
        for chunk in range(chunks):
            for place, got in zip(
                (chunk, chunk + 1), native.linear_borders(chunk, chunks, [shape] * weights, tiles), strict=True
            ):
                job, stage = divmod(cost * weights * tiles * place // chunks, cost)
                unit = int(np.searchsorted(borders, stage))
                if unit and stage - borders[unit - 1] < borders[unit] - stage:
                    unit -= 1
                assert got == [job, unit], (weights, tiles, place)


def blocks_of(layout: str) -> tuple[int, ...]:
    """An archive's chunk is a million weights, but for the last."""
    return (ROWS // reference._chunk_rows(COLUMNS),) if layout == "archive" else BLOCKS


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble", "archive"])
def test_unpack(layout: str) -> None:
    large = LargeMatrix(layout, ROWS, COLUMNS, blocks_of(layout))
    device = SimulatedDevice()
    matrices = large.on_device(device, layout_number(layout))
    out = device.allocate(2 * ROWS * COLUMNS, "out")
    sums = device.tensor(np.zeros(native.sums_bytes(matrices) // 8, np.uint64), "sums", readonly=False)
    status = device.tensor(np.zeros(1, np.uint64), "status", readonly=False)
    (plan,) = native.plan_unpack(matrices, native.RowRange(0, ROWS), out, sums, status)
    device.run(plan, large.blocks)
    for block in large.blocks:
        rows = large.rows_of(block)
        got = device.read(out + 2 * COLUMNS * rows.start, np.uint16, (rows.stop - rows.start, COLUMNS))
        assert_same_weights(got, large.small[large.small_rows(block)])
    native.raise_damage(device, matrices, status)


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble", "archive"])
def test_embedding(layout: str) -> None:
    large = LargeMatrix(layout, ROWS, COLUMNS, blocks_of(layout))
    device = SimulatedDevice()
    matrices = large.on_device(device, layout_number(layout))
    ids = np.array([large.rows_of(block).stop - 1 for block in large.blocks], np.int64)
    out = device.allocate(2 * len(ids) * COLUMNS, "out")
    status = device.tensor(np.zeros(1, np.uint64), "status", readonly=False)
    native.embedding(device, matrices, device.tensor(ids, "ids"), True, len(ids), out, status)
    expected = large.small[[large.small_rows(block).stop - 1 for block in large.blocks]]
    assert_same_weights(device.read(out, np.uint16, (len(ids), COLUMNS)), expected)
    native.raise_damage(device, matrices, status)
    on_cpu = torch.from_numpy(large.packed[: large.bytes].reshape(ROWS, -1))
    assert_same_weights(
        torch.ops.unweight.embedding(torch.from_numpy(ids), on_cpu, COLUMNS).view(torch.int16).numpy().view(np.uint16),
        expected,
    )
