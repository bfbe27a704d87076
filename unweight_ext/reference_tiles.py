"""The packed format as a program: the layouts made of tiles (docs/FORMAT.md sections 5 to 7).

`reference.py` is where to start. Registers of a tensor are u32 [block, stage, warp, k-step, lane, register].
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .reference_code import U4, Code, align, check, places, read_streams, write_streams, zeros_to

if TYPE_CHECKING:
    from .reference import Header

RAW_STAGE = 16400
RAW_FLAG = 1 << 14
PLANES = {"huffman": 4 + 2048, "nibble": 4 + 2048 + 1024}  # words before the sections of a stage
MOST_PATCHES = 128  # of a warp in a stage
SIGN_MANTISSA = np.uint32(0x807F807F)
EXPONENTS = np.uint32(0x7F807F80)

# ---------------------------------------------------------------------------------------------- 5. Tiles


def exponent_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.int64) >> 7) & 255


def _rotl(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def pad(matrix: np.ndarray, fill: int = 0) -> np.ndarray:
    """[N, K] to whole stages [64 * blocks, 128 * stages]."""
    n, k = matrix.shape
    padded = np.full((align(n, 64), align(k, 128)), fill, np.uint16)
    padded[:n, :k] = matrix
    return padded


def to_registers(padded: np.ndarray) -> np.ndarray:
    """Section 5: u16 [64 B, 128 S] to u32 [B, S, warp, k-step, lane, register]."""
    blocks, stages = padded.shape[0] // 64, padded.shape[1] // 128
    # Rows are (block, warp, i & 1, lane / 4), columns (stage, k-step, i >> 1, lane % 4, neighbour).
    axes = padded.view(U4).reshape(blocks, 4, 2, 8, stages, 8, 2, 4)
    return axes.transpose(0, 4, 1, 5, 3, 7, 6, 2).reshape(blocks, stages, 4, 8, 32, 4)


def from_registers(registers: np.ndarray) -> np.ndarray:
    """Section 5: the inverse of `to_registers`."""
    blocks, stages = registers.shape[:2]
    axes = registers.reshape(blocks, stages, 4, 8, 8, 4, 2, 2).transpose(0, 2, 7, 4, 1, 3, 6, 5)
    return np.ascontiguousarray(axes).reshape(64 * blocks, 64 * stages).view(np.uint16)


def _s_plane(registers: np.ndarray) -> np.ndarray:
    """Section 5: u32 [warp, k-step, lane, 4] to the S words in file order."""
    s = (registers[..., 0::2] & SIGN_MANTISSA) | (_rotl(registers[..., 1::2], 24) & ~SIGN_MANTISSA)
    return s.reshape(4, 4, 2, 32, 2).transpose(0, 1, 3, 2, 4).ravel()


def _from_s_plane(words: np.ndarray) -> np.ndarray:
    """Section 5: the inverse of `_s_plane`; the exponents are 0."""
    s = words.reshape(4, 4, 32, 2, 2).transpose(0, 1, 3, 2, 4).reshape(4, 8, 32, 2)
    return np.stack([s & SIGN_MANTISSA, _rotl(s & ~SIGN_MANTISSA, 8)], axis=-1).reshape(4, 8, 32, 4)


def _write_patches(needed: np.ndarray, exponents: np.ndarray) -> tuple[int, np.ndarray]:
    """Section 5: k-step mask and patch words of a warp, from bool and u32 [k-step, lane, register]."""
    k, lane, i = np.nonzero(needed)
    words = exponents[needed] | (4 * lane + i).astype(np.uint32)
    words[:-1] |= (k[1:] == k[:-1]).astype(np.uint32) << np.uint32(31)
    return sum(1 << int(step) for step in np.unique(k)), words


def _read_patches(words: np.ndarray, mask: int, where: str) -> tuple[np.ndarray, ...]:
    """Section 5: k-step, lane, register and exponents (u32, in place) of the patches of a warp."""
    steps = np.flatnonzero(mask >> np.arange(8) & 1)
    ends = words >> np.uint32(31) == 0
    ok = ends.sum() == len(steps) and (words.size == 0 or ends[-1])
    check(ok, f"{where}: patches", f"{len(steps)} k-steps", f"{ends.sum()} runs in {len(words)} patches")
    k = steps[np.cumsum(ends) - ends]
    slot = (words & np.uint32(127)).astype(np.int64)
    check((np.diff(128 * k + slot) > 0).all(), f"{where}: patches", "rising order", slot)
    check(not (words & np.uint32(0x007F8000)).any(), f"{where}: bits 15 to 22 of patches", 0, words)
    return k, slot // 4, slot % 4, words & EXPONENTS


class Section(NamedTuple):
    """Section 5: what a stage holds of one warp after the planes."""

    mask: int  # k-steps with patches
    patches: np.ndarray
    zero_rows: int = 0
    words: np.ndarray = np.zeros(0, U4)  # of the streams, `huffman` only


def _write_stage(planes: np.ndarray, sections: list[Section]) -> bytes:
    body, heads = [planes.astype(U4)], []
    for s in sections:
        start = 4 + sum(map(len, body))
        heads.append(start | bool(s.zero_rows) << 13 | s.mask << 16 | len(s.patches) << 24)
        body += [np.array([s.zero_rows] if s.zero_rows else [], U4), s.patches.astype(U4), s.words.astype(U4)]
    return zeros_to(np.concatenate([np.array(heads, U4), *body]).tobytes(), 16)


def raw_stage(registers: np.ndarray) -> bytes:
    return np.full(4, RAW_FLAG, U4).tobytes() + registers.astype(U4).tobytes()


def _read_stage(words: np.ndarray, layout: str, where: str) -> list[Section]:
    """Section 5: the warps' sections of a stage (u32), each with everything up to the next one or the stage's end."""
    heads = words[:4].astype(np.int64)
    planes, unused = PLANES[layout], 0xC000 if layout == "nibble" else 0xE000
    check(len(words) >= planes, f"{where}: size", f"{4 * planes} bytes at least", 4 * len(words))
    check(not (heads & unused).any(), f"{where}: header without the bits {unused:#x}", 0, heads & unused)
    starts = [*(heads & 0x1FFF).tolist(), len(words)]
    check(starts[0] == planes and starts == sorted(starts), f"{where}: sections", f"rising from {planes}", starts)
    sections = []
    for w, head in enumerate(heads):
        rest = words[starts[w] : starts[w + 1]]
        has_mask, count = int(head >> 13 & 1), int(head >> 24)
        at = f"{where}, warp {w}"
        check(count <= MOST_PATCHES, f"{at}: patches", f"at most {MOST_PATCHES}", count)
        check(len(rest) >= has_mask + count, f"{at}: words", f"{has_mask + count} at least", len(rest))
        zero_rows = int(rest[0]) if has_mask else 0
        sections.append(Section(int(head >> 16 & 255), rest[has_mask:][:count], zero_rows, rest[has_mask + count :]))
    return sections


class Stage(NamedTuple):
    """A stage that isn't raw, while it is decoded: exponents still have to be put into the registers."""

    where: str
    registers: np.ndarray  # u32 [warp, k-step, lane, register], a view of the tensor's
    n_plane: np.ndarray  # u32 [1024], `nibble` only
    sections: list[Section]  # of the warps


def _check_words(w: int, words: np.ndarray, expected: int, where: str) -> None:
    """Section 5: a section ends where the next one starts; zeros follow the last up to a multiple of 16 bytes."""
    room = 4 if w == 3 else 1
    check(0 <= len(words) - expected < room, f"{where}: words after the patches", expected, len(words))
    check(not words[expected:].any(), f"{where}: end of the stage", "zeros", words[expected:])


def decode_tiles(header: Header, stages: list[np.ndarray]) -> tuple[np.ndarray, int]:
    """Section 5: `raw`, `huffman` and `nibble` to uint16 [N, K]; also the number of patches."""
    blocks, per_block = -(-header.n // 64), -(-header.k // 128)
    registers = np.empty((blocks, per_block, 4, 8, 32, 4), np.uint32)
    is_raw = np.full((blocks, per_block), header.layout == "raw")
    patches = 0
    for b in range(blocks):
        for first in range(0, per_block, header.segment_stages):
            live = []
            for s in range(first, min(first + header.segment_stages, per_block)):
                words, where = stages[b * per_block + s].view(U4), f"stage {s} of block {b}"
                is_raw[b, s] |= header.layout == "huffman" and words[0] & RAW_FLAG
                if is_raw[b, s]:
                    ok = 4 * len(words) == RAW_STAGE and (words[:4] == RAW_FLAG).all()
                    expected = f"{RAW_STAGE} bytes, 4 × {RAW_FLAG:#x} first"
                    check(ok, f"{where}: raw stage", expected, f"{4 * len(words)} bytes, {words[:4]}")
                    registers[b, s] = words[4:].reshape(4, 8, 32, 4)
                    continue
                sections = _read_stage(words, header.layout, where)
                patches += sum(len(section.patches) for section in sections)
                registers[b, s] = _from_s_plane(words[4 : 4 + 2048])
                live.append(Stage(where, registers[b, s], words[4 + 2048 :][:1024], sections))
            if header.layout == "huffman" and live:
                _decode_segment(header.code, live)
            if header.layout == "nibble":
                for stage in live:
                    _decode_nibble(header, min(64, header.n - 64 * b), stage)
    padded = from_registers(registers)
    bits = padded[: header.n, : header.k].copy()
    padded[: header.n, : header.k] = 0
    no_padding = np.where(is_raw.repeat(64, 0).repeat(128, 1), padded, padded & 0x807F | (exponent_of(padded) == 255))
    check(not no_padding.any(), "padding", "±0 (sign, mantissa 0; exponent not 255, in raw stages 0)", "other weights")
    return bits, patches


# ---------------------------------------------------------------------------------------------- 6. nibble

NIBBLES = np.uint32(0x87878787)
ROW_OF = np.arange(32)[:, None] // 4 + 8 * (np.arange(4) & 1)  # [lane, register]: row in the warp's 16


def nibble_base(matrices: np.ndarray) -> int:
    """Section 6: the lowest base whose window of 16 holds most exponents."""
    counts = np.bincount(exponent_of(matrices).ravel(), minlength=256)[1:255]
    return 1 + int(np.convolve(counts, np.ones(16, np.int64), "valid").argmax())


def _join(halves: np.ndarray) -> np.ndarray:
    """Numbers below 256 [..., 2] to u32 [...] with the two where a register has its exponents."""
    return np.ascontiguousarray(halves.astype(np.uint16) << np.uint16(7)).view(U4)[..., 0]


def _zero_rows(matrix: np.ndarray) -> np.ndarray:
    """Section 6: bool [block, stage, warp, 16]: rows of a stage, not of the padding, that are +0."""
    padded = pad(matrix)
    zero = (padded.reshape(len(padded), -1, 128) == 0).all(axis=2)
    zero[len(matrix) :] = False
    return zero.reshape(-1, 4, 16, zero.shape[1]).transpose(0, 3, 1, 2)


def encode_nibble(matrix: np.ndarray, base: int) -> tuple[list, int] | None:
    """Section 6: stages of each block and the number of patches; None if the matrix cannot be `nibble`."""
    registers = to_registers(pad(matrix, base << 7))  # padding has the exponent whose code is 0
    weights = registers.view(np.uint16).reshape(*registers.shape, 2)
    exponent = exponent_of(weights)
    special = (exponent == 0) | (exponent == 255)
    outside = (exponent < base) | (exponent >= base + 16)
    scaled = np.where(special, exponent, exponent + 112 - base)
    subnormal = (exponent == 0) & (weights & 0x7F != 0)
    zero = _zero_rows(matrix)
    needed = outside.any(axis=-1) & ~zero[:, :, :, None, ROW_OF]
    no_room = needed.sum(axis=(3, 4, 5)).max() > MOST_PATCHES or 128 * needed.sum() > matrix.size
    if no_room or (subnormal | ~special & ((scaled < 1) | (scaled > 190))).any():
        return None
    c, patched = _join(np.where(outside, 0, exponent - base)), _join(scaled)
    plane = c[..., 0] | _rotl(c[..., 1], 24) | _rotl(c[..., 2] | _rotl(c[..., 3], 24), 4)
    blocks = []
    for b in range(len(registers)):
        blocks.append([])
        for s in range(registers.shape[1]):
            planes = [_s_plane(registers[b, s]), plane[b, s].reshape(4, 4, 2, 32).transpose(0, 1, 3, 2).ravel()]
            masks = zero[b, s] @ (1 << np.arange(16))
            sections = [Section(*_write_patches(needed[b, s, w], patched[b, s, w]), int(masks[w])) for w in range(4)]
            blocks[-1].append(_write_stage(np.concatenate(planes), sections))
    return blocks, int(needed.sum())


def _decode_nibble(header: Header, rows: int, stage: Stage) -> None:
    """Section 6: put the exponents into the registers of a stage, whose first `rows` rows aren't padding."""
    plane = stage.n_plane.reshape(4, 4, 32, 2).transpose(0, 1, 3, 2).reshape(4, 8, 32)
    for half, n in ((0, plane), (2, _rotl(plane, 28))):
        t = (n & NIBBLES) | np.uint32(0x38383838)
        stage.registers[..., half] |= t & EXPONENTS
        stage.registers[..., half + 1] |= _rotl(t, 8) & EXPONENTS
    for w, (section, registers) in enumerate(zip(stage.sections, stage.registers, strict=True)):
        where = f"{stage.where}, warp {w}"
        _check_words(w, section.words, 0, where)
        k, lane, i, exponents = _read_patches(section.patches, section.mask, where)
        registers[k, lane, i] = (registers[k, lane, i] & SIGN_MANTISSA) | exponents

        limit = 1 << max(0, min(16, rows - 16 * w))
        check(section.zero_rows < limit, f"{where}: zero rows", f"below {limit:#x}", f"{section.zero_rows:#x}")
        zero = (section.zero_rows >> ROW_OF & 1).astype(bool)  # [lane, register]
        check(not zero[lane, i].any(), f"{where}: patches", "none in zero rows", f"{section.zero_rows:#x}")
        nonzero = registers[:, zero] & SIGN_MANTISSA
        check(not nonzero.any(), f"{where}: zero rows", "signs and mantissas 0", nonzero)

        weights = registers.view(np.uint16).reshape(8, 32, 4, 2)
        scaled = exponent_of(weights)
        special = (scaled == 0) | (scaled == 255)
        exponent = np.where(special, scaled, scaled + header.base - 112)
        ok = special | ((scaled <= 190) & (exponent >= 1) & (exponent <= 254))
        check(ok.all(), f"{where}: scaled exponents", "0, 1 to 190, or 255", scaled[~ok])
        check(not (weights & 0x7F)[scaled == 0].any(), f"{where}: weights", "no subnormals", weights[scaled == 0])
        weights[...] = (weights & 0x807F) | (exponent << 7).astype(np.uint16)
        registers[:, zero] = 0


# ---------------------------------------------------------------------------------------------- 7. huffman


def _pairs_of(registers: np.ndarray) -> np.ndarray:
    """The exponent pair of each register."""
    return (registers >> np.uint32(7) & np.uint32(255)) | (registers >> np.uint32(15) & np.uint32(0xFF00))


def _registers_of(pairs: np.ndarray) -> np.ndarray:
    """The exponents of pairs, u32, where a register has them."""
    return _join(np.stack([pairs & 255, pairs >> 8], axis=-1))


def _pair_registers(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Section 7: registers of a tensor, and which of them hold a pair that counts; the others are padding."""
    n, k = matrix.shape
    padded = pad(matrix)
    if k % 2:
        last = exponent_of(matrix[:, -1])
        padded[:n, k] = np.where(last == 255, 0, last) << 7
    return to_registers(padded), to_registers(pad(np.ones_like(matrix))) & np.uint32(1) != 0


def count_pairs(matrix: np.ndarray) -> np.ndarray:
    """Section 7: i64 [65536], how often each pair occurs."""
    registers, counted = _pair_registers(matrix)
    return np.bincount(_pairs_of(registers[counted]), minlength=65536)


def encode_huffman(matrix: np.ndarray, code: Code) -> tuple[list, int]:
    """Section 7: stages of each block and the number of patches."""
    registers, counted = _pair_registers(matrix)
    raw_registers = to_registers(pad(matrix))
    first = int(code.pairs[0])
    pairs = np.where(counted, _pairs_of(registers), 0 if 255 in divmod(first, 256) else first)
    place = places(pairs, code)
    needed = code.pairs[place] != pairs
    is_raw = needed.sum(axis=(3, 4, 5)).max(axis=2) > MOST_PATCHES  # [block, stage]
    blocks, segment = [], segment_stages(*matrix.shape)
    for b in range(len(registers)):
        blocks.append([raw_stage(stage) for stage in raw_registers[b]])
        for start in range(0, len(blocks[b]), segment):
            live = start + np.flatnonzero(~is_raw[b, start : start + segment])
            if live.size == 0:
                continue
            sections = {s: [] for s in live}
            for w in range(4):
                words, through = write_streams(place[b, live, w].reshape(-1, 32, 4), code, 2)
                for s, part in zip(live, np.split(words, through[7:-1:8]), strict=True):
                    mask, patches = _write_patches(needed[b, s, w], _registers_of(pairs[b, s, w]))
                    sections[s].append(Section(mask, patches, 0, part))
            for s in live:
                blocks[b][s] = _write_stage(_s_plane(registers[b, s]), sections[s])
    return blocks, int(needed[~is_raw].sum())


def _decode_segment(code: Code, live: list[Stage]) -> None:
    """Section 7: put the exponents into the registers of a segment's stages that aren't raw."""
    for w in range(4):
        pairs, expected = read_streams(code, [stage.sections[w].words for stage in live], 8, 32, 2, 4)
        for stage, part, words in zip(live, pairs.reshape(-1, 8, 32, 4), expected, strict=True):
            where, section = f"{stage.where}, warp {w}", stage.sections[w]
            _check_words(w, section.words, words, where)
            exponents = _registers_of(part)
            k, lane, i, patched = _read_patches(section.patches, section.mask, where)
            exponents[k, lane, i] = patched
            stage.registers[w] |= exponents


def segment_stages(n: int, k: int) -> int:
    """Section 9: the length of a segment follows from the shape alone."""
    blocks, stages = -(-n // 64), -(-k // 128)
    if blocks * -(-stages // 8) < 64:
        return 16

    def busiest(length: int) -> int:
        work, together = blocks * stages, 132 * length
        return work + together // 2 if stages % length else -(-work // together) * together

    lengths = range(8, max(8, min(32, stages)) + 1)
    return min(lengths, key=lambda length: Fraction((107 * length + 13) * busiest(length), length))
