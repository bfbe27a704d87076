"""Packed matrices of billions of weights, of which a few blocks are there: memory that nobody touches costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from linear_product import packed
from native_module import native
from ptxsim import sparse
from ptxsim.device import SimulatedDevice

from unweight_ext import reference

CONTENT = {"raw": "any bits", "huffman": "few outsiders", "nibble": "few outsiders", "archive": "few outsiders"}


class LargeMatrix:
    """[rows, columns], packed, with an index for all of it as the codec writes it. Of its blocks (chunks of an archive)
    only `blocks` are there: those of a small matrix that the codec packed. The others are zeros, so damaged.

    small: the weights of `blocks`, BF16 as uint16, one block below the other.
    """

    def __init__(self, layout: str, rows: int, columns: int, blocks: Sequence[int]) -> None:
        self.rows, self.columns, self.blocks = rows, columns, tuple(blocks)
        archive = layout == "archive"
        self.block_rows = reference._chunk_rows(columns) if archive else 64
        self.count, units = reference._blocks_and_units(layout, rows, columns)
        stages = units // self.count
        there = [len(range(*self.rows_of(block).indices(rows))) for block in blocks]
        assert set(there[:-1]) <= {self.block_rows}, "only the last block may be short"
        self.small_packed = packed(CONTENT[layout], (sum(there), columns), layout)
        self.small = reference.unpack(self.small_packed)
        header, flat = reference.parse_header(self.small_packed), self.small_packed.reshape(-1)
        segment = 0 if archive else native.segment_stages(rows, columns)
        assert layout != "huffman" or stages <= min(segment, header.segment_stages), "its streams would start elsewhere"

        table = flat[128 : header.index_offset]
        offsets = reference._offsets(layout, rows, columns, 32 + 2 * len(header.code.pairs) if header.code else 0)
        small_index = flat[header.index_offset :][: 4 * (len(blocks) * stages + 1)].view("<u4").astype(np.int64)
        small_lengths = np.diff(small_index)
        lengths = np.full(units, small_lengths[0] * self.block_rows // there[0])
        for place, block in enumerate(blocks):
            lengths[block * stages :][:stages] = small_lengths[place * stages :][:stages]
        index = np.concatenate([[0], np.cumsum(lengths)])
        used = offsets[2] + 16 * int(index[-1])
        self.bytes = -(-used // rows) * rows
        self.packed = sparse.zeros(-(-self.bytes // 16) * 16, np.uint8)
        changed = header._replace(
            n=rows, shape=(rows, columns), used_bytes=used, index_offset=offsets[0], checksums_offset=offsets[1],
            data_offset=offsets[2], checksum=0, segment_stages=segment,
        )  # fmt: skip
        self.packed[:128] = np.frombuffer(changed.to_bytes(), np.uint8)
        self.packed[128:][: len(table)] = table
        self.packed[offsets[0] :][: 4 * len(index)] = index.astype("<u4").view(np.uint8)
        self.begins = {}  # bytes before a block
        for place, block in enumerate(blocks):
            begin, end = small_index[[place * stages, (place + 1) * stages]].tolist()
            data = flat[header.data_offset + 16 * begin : header.data_offset + 16 * end]
            self.begins[block] = offsets[2] + 16 * int(index[block * stages])
            self.packed[self.begins[block] :][: len(data)] = data
            self.packed[offsets[1] + 8 * block :][:8].view("<u8")[0] = reference.checksum(data)
        self.packed[16:24].view("<u8")[0] = reference.checksum(self.packed[: offsets[2]])

    def rows_of(self, block: int) -> slice:
        """Rows of a block in the matrix."""
        return slice(self.block_rows * block, min(self.block_rows * (block + 1), self.rows))

    def small_rows(self, block: int) -> slice:
        """Rows of a block in `small`."""
        first = self.block_rows * self.blocks.index(block)
        return slice(first, first + self.rows_of(block).stop - self.rows_of(block).start)

    def on_device(self, device: SimulatedDevice, layout: int) -> native.PackedMatrices:
        address = device.machine.memory.adopt(self.packed, "packed").base
        return native.PackedMatrices(address, self.bytes, self.rows, self.columns, layout=layout)
