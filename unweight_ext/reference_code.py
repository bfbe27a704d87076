"""The packed format as a program: checksum, code table and bit streams (docs/FORMAT.md sections 3, 4 and 7).

`reference.py` is where to start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

U4, U8 = np.dtype("<u4"), np.dtype("<u8")
LONGEST = {"huffman": 8, "archive": 12}  # bits of the longest code
RAREST = {"huffman": 12, "archive": 17}  # T: a pair that is one in 2^T or more has a code


def check(ok: object, what: str, expected: object, got: object) -> None:
    """Every rule of the format goes through here: ValueError with what (and where), expected and got."""
    if not ok:
        raise ValueError(f"packed: {what}: expected {expected}, got {got}")


def align(n: int, step: int) -> int:
    return -(-n // step) * step


def zeros_to(data: bytes, step: int) -> bytes:
    return data + bytes(align(len(data), step) - len(data))


# ---------------------------------------------------------------------------------------------- 3. Checksum


def checksum(data: np.ndarray | bytes) -> int:
    """Section 3: the sum of (2^32 + t + 1) * word t modulo 2^64. `len(data)` is a multiple of 4."""
    words = np.frombuffer(data, U4).astype(np.uint64)
    weights = np.arange(1, words.size + 1, dtype=np.uint64) + np.uint64(1 << 32)
    return int((weights * words).sum())


# ---------------------------------------------------------------------------------------------- 4. Code table


class Code(NamedTuple):
    """Section 4: canonical codes of exponent pairs, in order of their codes."""

    longest: int
    pairs: np.ndarray  # u16 [n]
    lengths: np.ndarray  # i64 [n]

    def to_bytes(self) -> bytes:
        counts = np.bincount(self.lengths, minlength=16)
        return counts.astype("<u2").tobytes() + self.pairs.astype("<u2").tobytes()

    def codes(self) -> np.ndarray:
        """u64 [n]: the code before plus one, shifted left by the growth in length."""
        # Aligned to the longest code, each code is the sum of the spans of those before it.
        spans = 1 << (self.longest - self.lengths)
        return ((np.cumsum(spans) - spans) >> (self.longest - self.lengths)).astype(np.uint64)

    def lookup(self) -> tuple[np.ndarray, np.ndarray]:
        """Pair and length for each value of the next `longest` bits; pair 0, length 1 where no code starts."""
        spans = 1 << (self.longest - self.lengths)
        pairs, lengths = np.zeros(1 << self.longest, np.uint16), np.ones(1 << self.longest, np.int64)
        pairs[: spans.sum()], lengths[: spans.sum()] = np.repeat(self.pairs, spans), np.repeat(self.lengths, spans)
        return pairs, lengths


def build_code(counts: np.ndarray, layout: str) -> Code:
    """Section 4: the table that `pack` writes. `counts` is i64 [65536], how often each pair occurs."""
    longest = LONGEST[layout]
    order = np.lexsort((np.arange(65536), -counts))
    kept = int((counts * (1 << RAREST[layout]) >= counts.sum()).sum())
    pairs = order[: min(max(kept, 1), 1 << longest)]
    weights = counts[pairs]
    weights[0] += counts.sum() - weights.sum()
    return Code(longest, pairs.astype(np.uint16), package_merge(weights, longest))


def package_merge(weights: np.ndarray, longest: int) -> np.ndarray:
    """Section 4: lengths (i64, rising) of an optimal code of at most `longest` bits for falling `weights`."""
    leaves = weights[::-1]
    n = len(leaves)
    if n == 1:
        return np.ones(1, np.int64)
    levels = [np.ones(n, bool)]  # of each level, rising by weight: is it a leaf?
    merged = leaves
    for _ in range(longest - 1):
        packages = merged[: len(merged) // 2 * 2].reshape(-1, 2).sum(axis=1)
        items = np.concatenate([leaves, packages])
        order = np.argsort(items, kind="stable")  # a leaf before a package of equal weight
        levels.append(order < n)
        merged = items[order]
    lengths, taken = np.zeros(n, np.int64), 2 * n - 2
    for is_leaf in reversed(levels):
        in_level = int(is_leaf[:taken].sum())
        lengths[:in_level] += 1
        taken = 2 * (taken - in_level)
    return lengths[::-1]


def read_code(table: np.ndarray, longest: int) -> tuple[Code, int]:
    """Section 4: read and check the table at the start of `table` (uint8); also its size in bytes."""
    check(table.size >= 32, "code table", "32 bytes at least", f"{table.size} bytes")
    counts = table[:32].view("<u2").astype(np.int64)
    check(counts[0] == 0 and not counts[longest + 1 :].any(), "code lengths", f"1 to {longest}", counts)
    space = int((counts[1 : longest + 1] << (longest - np.arange(1, longest + 1))).sum())
    check(1 <= space <= 1 << longest, "code space", f"1 to {1 << longest} of {1 << longest}", space)
    size = 32 + 2 * int(counts.sum())
    check(table.size >= size, "code table", f"{size} bytes", f"{table.size} bytes")
    return Code(longest, table[32:size].view("<u2"), np.repeat(np.arange(16), counts)), size


def places(pairs: np.ndarray, code: Code) -> np.ndarray:
    """Section 4: the place of each pair in the table, the first for pairs without a code."""
    place = np.zeros(65536, np.int64)
    place[code.pairs] = np.arange(len(code.pairs))
    return place[pairs]


# ---------------------------------------------------------------------------------------------- 7. Bit streams


def write_streams(place: np.ndarray, code: Code, streams: int) -> tuple[np.ndarray, np.ndarray]:
    """Section 7: bit streams of `place[step, lane, …]` in the table; step t belongs to stream `t % streams` of a lane.

    Returns the words in the order in which they are taken, and for each step how many are taken up to its end.
    """
    lanes = place.shape[1]
    step_codes, step_lengths = code.codes()[place], code.lengths[place]
    head, head_used = [], []
    taken, value, used = (np.empty(place.shape[:2], t) for t in (bool, np.uint64, bool))
    for g in range(streams):
        length = step_lengths[g::streams].transpose(1, 0, 2).reshape(lanes, -1)
        bits = step_codes[g::streams].transpose(1, 0, 2).reshape(lanes, -1)
        end = length.cumsum(axis=1)
        start = end - length
        words = np.zeros((lanes, end.max() // 32 + 3), np.uint64)
        shifted = bits << (64 - start % 32 - length).astype(np.uint64)
        lane = np.arange(lanes)[:, None]
        np.add.at(words, (lane, start // 32), shifted >> np.uint64(32))
        np.add.at(words, (lane, start // 32 + 1), shifted & np.uint64(0xFFFFFFFF))
        passed = end[:, place.shape[2] - 1 :: place.shape[2]] // 32  # [lane, step]: words left behind
        has_code = np.arange(words.shape[1]) * 32 < end[:, -1:]
        head += [words[:, 0], words[:, 1]]
        head_used += [has_code[:, 0], has_code[:, 1]]
        taken[g::streams] = np.diff(passed, axis=1, prepend=0).T
        value[g::streams] = words[lane, passed + 1].T
        used[g::streams] = has_code[lane, passed + 1].T
    order = np.concatenate([*head, value[taken]])
    kept = np.flatnonzero(np.concatenate([*head_used, used[taken]]))[-1] + 1
    through = 2 * streams * lanes + taken.sum(axis=1).cumsum()
    return order[:kept].astype(U4), np.minimum(through, kept)


def read_streams(code: Code, parts: list, steps: int, lanes: int, streams: int, codes: int) -> tuple[np.ndarray, list]:
    """Section 7: the inverse, from the words of each part (stage or chunk) of `steps` steps with `codes` codes a lane.

    Returns the pairs, u16 [step, lane, codes], and how many words each part has to have.
    """
    pair_at, length_at = code.lookup()
    window, position, number = (np.zeros((streams, lanes), t) for t in (np.uint64, np.int64, np.int64))
    pairs, takes = np.empty((len(parts) * steps, lanes, codes), np.uint16), []

    def take(g: int, who: np.ndarray) -> None:
        nonlocal rest
        new = np.concatenate([rest[: who.size], np.zeros(who.size, U4)])[: who.size]  # past the end: anything
        rest = rest[who.size :]
        window[g, who] = (window[g, who] << np.uint64(32)) | new
        takes.append((part, g, who, number[g, who]))
        number[g, who] += 1

    for part, rest in enumerate(parts):  # noqa: B007 (take() reads it)
        for g in range(streams) if part == 0 else ():
            take(g, np.arange(lanes))
            take(g, np.arange(lanes))
        for t in range(part * steps, (part + 1) * steps):
            g = t % streams
            for i in range(codes):
                shift = (64 - code.longest - position[g]).astype(np.uint64)
                bits = (window[g] >> shift) & np.uint64((1 << code.longest) - 1)
                pairs[t, :, i] = pair_at[bits]
                position[g] += length_at[bits]
            passed = np.flatnonzero(position[g] >= 32)
            position[g, passed] -= 32
            take(g, passed)
    ends = 32 * (number - 2) + position
    has_code = np.concatenate([32 * word < ends[g, who] for _, g, who, word in takes])
    part_of = np.concatenate([np.full(who.size, p) for p, _, who, _ in takes])[: np.flatnonzero(has_code)[-1] + 1]
    return pairs, list(np.bincount(part_of, minlength=len(parts)))
