"""The packed format as a program: docs/FORMAT.md, section by section, in numpy.

Written to be read and to check the fast codec against, not to be fast: `pack` gives the bytes that the C++ codec gives,
`unpack` refuses everything that FORMAT.md doesn't allow. BF16 weights are uint16 bit patterns throughout.

Here: the tensor, the header, `archive`, the choice of layout. `reference_code.py`: checksum, code table, bit streams.
`reference_tiles.py`: `raw`, `huffman`, `nibble`.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from .reference_code import (
    LONGEST,
    U4,
    U8,
    Code,
    align,
    build_code,
    check,
    checksum,
    places,
    read_code,
    read_streams,
    write_streams,
    zeros_to,
)
from .reference_tiles import (
    PLANES,
    RAW_STAGE,
    count_pairs,
    decode_tiles,
    encode_huffman,
    encode_nibble,
    exponent_of,
    nibble_base,
    pad,
    raw_stage,
    segment_stages,
    to_registers,
)

LAYOUTS = ("raw", "huffman", "nibble", "archive")

# ---------------------------------------------------------------------------------------------- 1. The tensor


def pack(weight_bits: np.ndarray, layout: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Section 1: pack uint16 `[N, K]` or `[E, N, K]` into uint8 `[N, row_bytes]` or `[E, N, row_bytes]`.

    `shape` is the original shape of one matrix, `(N, K)` if not given. The layout falls back as section 9 says.
    """
    bits = np.asarray(weight_bits)
    if bits.dtype != np.uint16 or bits.ndim not in (2, 3) or bits.size == 0:
        raise ValueError(f"weight_bits: expected uint16 [N, K] or [E, N, K], not empty, got {bits.dtype} {bits.shape}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    n, k = bits.shape[-2:]
    shape = (n, k) if shape is None else tuple(shape)
    if not 2 <= len(shape) <= 8 or shape[0] != n or prod(shape[1:]) != k:
        raise ValueError(f"shape: expected 2 to 8 dimensions, the first {n}, the others {k} together, got {shape}")
    used = _encode(bits.reshape(-1, n, k), layout, shape)
    longest = max(map(len, used))
    row_bytes = -(-longest // n) if bits.ndim == 2 else align(longest, n * 128 // gcd(n, 128)) // n
    packed = np.zeros((len(used), n * row_bytes), np.uint8)
    for row, data in zip(packed, used, strict=True):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return packed.reshape(*bits.shape[:-1], row_bytes)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Section 1: the inverse of `pack`; one matrix may be flat. Raises ValueError for whatever isn't allowed."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8 or packed.ndim not in (1, 2, 3) or packed.size == 0:
        raise ValueError(f"packed: expected uint8, 1 to 3 dimensions, not empty, got {packed.dtype} {packed.shape}")
    if packed.ndim == 3:
        check(packed[0].size % 128 == 0, "bytes of a stacked matrix", "a multiple of 128", packed[0].size)
        matrices = [unpack(matrix) for matrix in packed]
        shapes = {matrix.shape for matrix in matrices}
        check(len(shapes) == 1, "stacked matrices", "one shape", shapes)
        return np.stack(matrices)
    flat = np.ascontiguousarray(packed).reshape(-1)
    header = parse_header(flat)
    check(packed.ndim == 1 or len(packed) == header.n, "rows", header.n, len(packed))
    blocks, units = _blocks_and_units(header.layout, header.n, header.k)
    index = flat[header.index_offset :][: 4 * (units + 1)].view(U4).astype(np.int64)
    check(index[0] == 0 and (np.diff(index) > 0).all(), "index", "0 first, then rising", index)
    end = header.data_offset + 16 * int(index[-1])
    check(end == header.used_bytes, "index: end of the data", header.used_bytes, end)
    check(not flat[end:].any(), "bytes from used_bytes on", "zeros", flat[end:].max(initial=0))
    data = flat[header.data_offset : end]
    sums = flat[header.checksums_offset :][: 8 * blocks].view(U8)
    starts = 16 * index[:: units // blocks]
    for b in range(blocks):
        got = checksum(data[starts[b] : starts[b + 1]])
        check(got == sums[b], f"checksum of block {b}", f"{sums[b]:#x}", f"{got:#x}")
    units_data = [data[16 * index[u] : 16 * index[u + 1]] for u in range(units)]
    bits, patches = (_decode_archive if header.layout == "archive" else decode_tiles)(header, units_data)
    check(patches == header.patches, "number of patches", header.patches, patches)
    return bits


def _blocks_and_units(layout: str, n: int, k: int) -> tuple[int, int]:
    """Section 2: how many checksums and how many index steps a matrix has."""
    if layout == "archive":
        return -(-n // _chunk_rows(k)), -(-n // _chunk_rows(k))
    return -(-n // 64), -(-n // 64) * -(-k // 128)


# ---------------------------------------------------------------------------------------------- 2. Header

VERSION = 1
HEADER = struct.Struct("<8sH6B10Q8I")


class Header(NamedTuple):
    """Section 2: the 128 bytes, field by field, then what follows from them."""

    magic: bytes
    version: int
    layout: str
    dtype: int
    longest: int
    base: int
    rank: int
    segment_stages: int
    checksum: int
    n: int
    k: int
    used_bytes: int
    index_offset: int
    checksums_offset: int
    data_offset: int
    code_id: int
    patches: int
    zero: int
    shape: tuple[int, ...]
    code: Code | None = None

    def to_bytes(self) -> bytes:
        fields = self._replace(layout=LAYOUTS.index(self.layout))[:18]
        return HEADER.pack(*fields, *self.shape, *[0] * (8 - self.rank))


def _offsets(layout: str, n: int, k: int, table_bytes: int) -> tuple[int, int, int]:
    """Section 2: where the index, the checksums and the data start."""
    blocks, units = _blocks_and_units(layout, n, k)
    index = align(128 + table_bytes, 16)
    checksums = align(index + 4 * (units + 1), 16)
    return index, checksums, align(checksums + 8 * blocks, 128)


def parse_header(packed: np.ndarray) -> Header:
    """Section 2 (and 4): read and check everything before the index. `packed` is one matrix, uint8 of any shape."""
    flat = np.ascontiguousarray(packed).reshape(-1)
    check(flat.size >= 128, "size", "a header of 128 bytes", f"{flat.size} bytes")
    fields = HEADER.unpack(flat[:128].tobytes())
    check(fields[0] == b"UNWEIGHT", "magic", b"UNWEIGHT", fields[0])
    check(fields[1] == VERSION, "version", VERSION, fields[1])
    check(fields[2] < len(LAYOUTS), "layout", "0 to 3", fields[2])
    h = Header(*fields[:18], shape=fields[18 : 18 + min(fields[6], 8)])._replace(layout=LAYOUTS[fields[2]])
    check(h.dtype == 1, "dtype", "1 (bfloat16)", h.dtype)
    check(h.longest == LONGEST.get(h.layout, 0), "longest code", LONGEST.get(h.layout, 0), h.longest)
    check(1 <= h.base <= 239 if h.layout == "nibble" else h.base == 0, "base", "1 to 239, 0 unless nibble", h.base)
    segments = (0,) if h.layout == "archive" else range(8, 33)
    check(h.segment_stages in segments, "stages per segment", segments, h.segment_stages)
    ok = 1 <= h.n < 2**32 and 1 <= h.k < 2**32 and h.n * h.k <= 2**33
    check(ok, "N, K", "1 to 2^32 - 1 and N * K <= 2^33", (h.n, h.k))
    stages = -(-h.n // 64) * -(-h.k // 128)
    check(h.layout == "archive" or stages <= 2**21, "stages", "at most 2^21", stages)
    check(2 <= h.rank <= 8, "rank", "2 to 8", h.rank)
    check(h.shape[0] == h.n and prod(h.shape[1:]) == h.k, "shape", f"[{h.n}, {h.k} together]", h.shape)
    check(not any(fields[18 + h.rank :]) and h.zero == 0, "unused header fields", 0, (h.zero, fields[18:]))
    check(flat.size % h.n == 0, "size", f"a multiple of N = {h.n}", flat.size)

    blocks, units = _blocks_and_units(h.layout, h.n, h.k)
    code, table_bytes = read_code(flat[128:], h.longest) if h.longest else (None, 0)
    offsets = _offsets(h.layout, h.n, h.k, table_bytes)
    got = (h.index_offset, h.checksums_offset, h.data_offset)
    check(got == offsets, "offsets of index, checksums, data", offsets, got)
    # Signs and mantissas are never compressed, so a small tensor can't make a reader allocate a huge matrix.
    low = h.data_offset + (h.n * h.k if h.layout == "archive" else 4 * PLANES["huffman"] * units)
    check(low <= h.used_bytes <= flat.size, "used_bytes", f"{low} to {flat.size}", h.used_bytes)
    for name, start, end in (
        ("code table", 128 + table_bytes, h.index_offset),
        ("index", h.index_offset + 4 * (units + 1), h.checksums_offset),
        ("checksums", h.checksums_offset + 8 * blocks, h.data_offset),
    ):
        check(not flat[start:end].any(), f"gap after the {name}", "zeros", flat[start:end])
    code_id = checksum(flat[128 : h.index_offset])
    check(code_id == h.code_id, "code_id", f"{code_id:#x}", f"{h.code_id:#x}")
    head = flat[: h.data_offset].copy()
    head[16:24] = 0
    check(checksum(head) == h.checksum, "header checksum", f"{h.checksum:#x}", f"{checksum(head):#x}")
    return h._replace(code=code)


def _assemble(matrix: np.ndarray, layout: str, shape: tuple, base: int, code: Code | None, blocks: list, patches: int):
    """Sections 1 and 2: the used bytes of one matrix. `blocks` holds the units (stages or one chunk) of each block."""
    n, k = matrix.shape
    table = code.to_bytes() if code else b""
    offsets = _offsets(layout, n, k, len(table))
    units = [len(unit) // 16 for block in blocks for unit in block]
    index = np.concatenate([[0], np.cumsum(units)]).astype(U4)
    data = [b"".join(block) for block in blocks]
    sums = np.array([checksum(block) for block in data], U8)
    used = offsets[2] + 16 * sum(units)
    stages = 0 if layout == "archive" else segment_stages(n, k)
    header = Header(
        b"UNWEIGHT", VERSION, layout, 1, LONGEST.get(layout, 0), base, len(shape), stages,
        0, n, k, used, *offsets, checksum(zeros_to(table, 4)), patches, 0, shape,
    )  # fmt: skip
    rest = zeros_to(table, 16) + zeros_to(index.tobytes(), 16) + sums.tobytes()
    head = zeros_to(header.to_bytes() + rest, 128)
    return header._replace(checksum=checksum(head)).to_bytes() + head[128:] + b"".join(data)


# ---------------------------------------------------------------------------------------------- 8. archive


def _chunk_rows(k: int) -> int:
    """Section 8: rows of a chunk, 2^20 weights at least."""
    return 64 * -(-(2**20) // (64 * k))


def _chunk_pairs(chunk: np.ndarray) -> np.ndarray:
    """Section 8: the exponent pairs of a chunk, in order."""
    exponent = exponent_of(chunk.ravel())
    if exponent.size % 2:
        exponent = np.append(exponent, exponent[-1])
    return exponent[0::2] | exponent[1::2] << 8


def _count_pairs(matrix: np.ndarray) -> np.ndarray:
    """Section 8: i64 [65536], how often each pair occurs."""
    rows = _chunk_rows(matrix.shape[1])
    chunks = [_chunk_pairs(matrix[r : r + rows]) for r in range(0, len(matrix), rows)]
    return np.bincount(np.concatenate(chunks), minlength=65536)


def _encode_archive(matrix: np.ndarray, code: Code) -> tuple[list, int]:
    """Section 8: chunks, each the only unit of its block, and the number of patches."""
    blocks, total, rows = [], 0, _chunk_rows(matrix.shape[1])
    for r in range(0, len(matrix), rows):
        chunk = matrix[r : r + rows].ravel()
        pairs = _chunk_pairs(chunk)
        place = np.zeros(align(pairs.size, 128), np.int64)
        place[: pairs.size] = places(pairs, code)
        position = np.flatnonzero(code.pairs[place[: pairs.size]] != pairs)
        words, _ = write_streams(place.reshape(-1, 2, 64).transpose(0, 2, 1), code, 1)
        signs = ((chunk >> np.uint16(8) & np.uint16(0x80)) | (chunk & np.uint16(0x7F))).astype(np.uint8)
        patches = position.astype(U4).tobytes() + zeros_to(pairs[position].astype("<u2").tobytes(), 4)
        head = np.array([position.size, words.size, 0, 0], U4).tobytes()
        blocks.append([head + zeros_to(signs.tobytes(), 16) + zeros_to(patches + words.tobytes(), 16)])
        total += position.size
    return blocks, total


def _decode_archive(header: Header, chunks: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """Section 8: uint16 [N, K] and the number of patches."""
    bits, total, rows = [], 0, _chunk_rows(header.k)
    for c, chunk in enumerate(chunks):
        n = header.k * min(rows, header.n - c * rows)
        patches, count, *unused = (int(x) for x in chunk[:16].view(U4))
        check(unused == [0, 0], f"chunk {c}: header", "zeros at the end", unused)
        starts = np.cumsum([16, align(n, 16), 4 * patches, align(2 * patches, 4), 4 * count])
        check(align(starts[4], 16) == chunk.size, f"chunk {c}: size", align(starts[4], 16), chunk.size)
        signs, position, patch, words = (chunk[a:b] for a, b in pairwise(starts))
        rest = [signs[n:], patch[2 * patches :], chunk[starts[4] :]]
        check(not np.concatenate(rest).any(), f"chunk {c}: gaps", "zeros", rest)
        rounds = -(-n // 256)
        pairs, expected = read_streams(header.code, [words.view(U4)], rounds, 64, 1, 2)
        check(count == expected[0], f"chunk {c}: words", expected[0], count)
        pairs = pairs.transpose(0, 2, 1).ravel()[: -(-n // 2)]
        position = position.view(U4).astype(np.int64)
        ok = (np.diff(position, prepend=-1) > 0).all() and position.max(initial=0) < pairs.size
        check(ok, f"chunk {c}: positions of patches", f"rising, below {pairs.size}", position)
        pairs[position] = patch[: 2 * patches].view("<u2")
        exponent, signs = pairs.view(np.uint8)[:n].astype(np.uint16), signs[:n].astype(np.uint16)
        bits.append((signs & 0x80) << 8 | exponent << 7 | (signs & 0x7F))
        total += patches
    return np.concatenate(bits).reshape(header.n, header.k), total


# ---------------------------------------------------------------------------------------------- 9. Choice of layout


def _encode(matrices: np.ndarray, layout: str, shape: tuple[int, ...]) -> list[bytes]:
    """Section 9: the used bytes of each matrix of [E, N, K], with the fall-backs; all in one layout."""
    _, n, k = matrices.shape
    base, code = 0, None
    if layout == "raw":
        tiles = [to_registers(pad(matrix)) for matrix in matrices]
        parts = [([[raw_stage(stage) for stage in block] for block in blocks], 0) for blocks in tiles]
    elif layout == "nibble":
        base = nibble_base(matrices)
        parts = [encode_nibble(matrix, base) for matrix in matrices]
        if None in parts:
            return _encode(matrices, "huffman", shape)
    else:
        count = _count_pairs if layout == "archive" else count_pairs
        code = build_code(sum(count(matrix) for matrix in matrices), layout)
        parts = [(_encode_archive if layout == "archive" else encode_huffman)(matrix, code) for matrix in matrices]
    used = [_assemble(m, layout, shape, base, code, *part) for m, part in zip(matrices, parts, strict=True)]
    raw_size = _offsets("raw", n, k, 0)[2] + RAW_STAGE * _blocks_and_units("raw", n, k)[1]
    if layout != "raw" and raw_size <= max(map(len, used)):
        return _encode(matrices, "raw", shape)
    return used
