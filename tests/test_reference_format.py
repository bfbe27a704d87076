"""The bytes that the reference writes, read a second time from docs/FORMAT.md: word by word, bit by bit."""

import itertools
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import assert_same, content, stages_of

from unweight_ext import reference, reference_code, reference_tiles


def test_header_fields_are_where_the_table_says():
    bits = content("trained", (65, 129))
    packed = reference.pack(bits, "nibble", (65, 3, 43)).tobytes()
    header = reference.parse_header(np.frombuffer(packed, np.uint8))
    assert packed[:8] == b"UNWEIGHT"
    assert struct.unpack_from("<H6B", packed, 8) == (1, 2, 1, 0, header.base, 3, 16)
    assert struct.unpack_from("<QQQ", packed, 24) == (65, 129, header.used_bytes)
    # 2 blocks × 2 stages: 5 index entries from 128, 2 checksums from 160, data from 256.
    assert struct.unpack_from("<QQQ", packed, 48) == (128, 160, 256)
    assert struct.unpack_from("<QQQ", packed, 72) == (0, header.patches, 0)
    assert struct.unpack_from("<8I", packed, 96) == (65, 3, 43, 0, 0, 0, 0, 0)
    zeroed = packed[:16] + bytes(8) + packed[24:256]
    assert header.checksum == sum((2**32 + t + 1) * w for t, w in enumerate(struct.unpack("<64I", zeroed))) % 2**64


def test_checksum():
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    words = struct.unpack("<1024I", data.tobytes())
    assert reference.checksum(data) == sum((2**32 + t + 1) * w for t, w in enumerate(words)) % 2**64
    assert (
        reference.checksum(np.full(1 << 23, 255, np.uint8))
        == sum(range(2**32 + 1, 2**32 + (1 << 21) + 1)) * 0xFFFFFFFF % 2**64
    )
    assert reference.checksum(b"") == 0


def test_fragment_order():
    padded = np.arange(128 * 256, dtype=np.uint16).reshape(128, 256)
    registers = reference_tiles.to_registers(padded)
    for b, s, w, k, lane, i in itertools.product(range(2), range(2), range(4), range(8), range(32), range(4)):
        row, column = 16 * w + lane // 4 + 8 * (i & 1), 16 * k + 2 * (lane % 4) + 8 * (i >> 1)
        pair = padded[64 * b + row, 128 * s + column :][:2]
        assert registers[b, s, w, k, lane, i] == int(pair[0]) | int(pair[1]) << 16
    assert np.array_equal(reference_tiles.from_registers(registers), padded)


def test_raw_stage_holds_the_registers():
    bits = content("any bits", (64, 128))
    (stage,) = stages_of(reference.pack(bits, "raw"))
    words = stage.view("<u4")
    assert stage.size == 16400 and (words[:4] == 0x4000).all()
    assert np.array_equal(words[4:], reference_tiles.to_registers(bits).ravel())


def rotr(x: int, by: int) -> int:
    return (x >> by | x << (32 - by)) & 0xFFFFFFFF


def read_s_plane(words: np.ndarray, registers: dict) -> None:
    """Signs and mantissas, as a decoder would take them: word by word."""
    m = 0x807F807F
    for w, k, lane, half in itertools.product(range(4), range(8), range(32), range(2)):
        s = int(words[(16 + 2048 * w + 512 * (k // 2) + 16 * lane) // 4 + 2 * (k % 2) + half])
        registers[w, k, lane, 2 * half] = s & m
        registers[w, k, lane, 2 * half + 1] = rotr(s & ~m & 0xFFFFFFFF, 24)


def apply_patches(words: np.ndarray, w: int, start: int, registers: dict) -> int:
    """Also the place after them. Kernels step through the k-steps of the mask the same way."""
    for k in range(8):
        more = int(words[w]) >> 16 + k & 1
        while more:
            patch = int(words[start])
            register = (w, k, (patch & 127) // 4, patch % 4)
            registers[register] = registers[register] & 0x807F807F | patch & 0x7F807F80
            start, more = start + 1, patch >> 31
    return start


def to_matrix(registers: dict) -> np.ndarray:
    bits = np.zeros((64, 128), np.uint16)
    for (w, k, lane, i), value in registers.items():
        row, column = 16 * w + lane // 4 + 8 * (i & 1), 16 * k + 2 * (lane % 4) + 8 * (i >> 1)
        bits[row, column : column + 2] = value & 0xFFFF, value >> 16
    return bits


def decoder(code: reference.Code) -> dict[str, int]:
    """Bit strings to pairs, by the words of section 4."""
    table, value, before = {}, -1, 0
    for pair, length in zip(code.pairs.tolist(), code.lengths.tolist(), strict=True):
        value = value + 1 << length - before
        before = length
        table[f"{value:0{length}b}"] = pair
    return table


class Words:
    """Words one after the other, as 32 digits; zeros past the end."""

    def __init__(self, words: np.ndarray):
        self.words, self.at = words.tolist(), 0

    def take(self) -> str:
        self.at += 1
        return f"{self.words[self.at - 1] if self.at <= len(self.words) else 0:032b}"


def read_pair(bits: str, table: dict[str, int]) -> tuple[int, str]:
    for length in range(1, 13):
        if bits[:length] in table:
            return table[bits[:length]], bits[length:]
    raise AssertionError("no code")


def test_nibble_read_word_by_word():
    bits = content("patched", (64, 128), 2)
    bits[[3, 17, 40]] = 0
    packed = reference.pack(bits, "nibble")
    header = reference.parse_header(packed)
    assert header.layout == "nibble" and header.patches > 0
    (stage,) = stages_of(packed)
    words, registers = stage.view("<u4"), {}
    read_s_plane(words, registers)
    for w, k, lane in itertools.product(range(4), range(8), range(32)):
        n = int(words[(16 + 8192 + 1024 * w + 256 * (k // 2) + 8 * lane) // 4 + k % 2])
        for i in range(4):
            t = (rotr(n, 4 * (i // 2)) & 0x87878787) | 0x38383838
            registers[w, k, lane, i] |= (rotr(t, 24) if i % 2 else t) & 0x7F807F80
    start = 12304 // 4
    for w in range(4):
        assert (int(words[w]) & 0x1FFF) == start
        zero = int(words[start]) if words[w] >> 13 & 1 else 0
        assert zero == [1 << 3, 1 << 1, 1 << 8, 0][w]
        start = apply_patches(words, w, start + (zero != 0), registers)
        for k, lane, i in itertools.product(range(8), range(32), range(4)):
            if zero >> lane // 4 + 8 * (i & 1) & 1:
                registers[w, k, lane, i] = 0
    assert len(words) == -(-start // 4) * 4 and not words[start:].any()
    got = to_matrix(registers)
    exponent = (got >> 7 & 255).astype(int)
    unscaled = np.where((exponent == 0) | (exponent == 255), exponent, exponent + header.base - 112)
    assert_same((got & 0x807F) | (unscaled << 7).astype(np.uint16), bits)


def test_huffman_read_word_by_word():
    bits = content("half noise", (64, 384), 1)
    packed = reference.pack(bits, "huffman")
    header = reference.parse_header(packed)
    table = decoder(header.code)
    stages = [stage.view("<u4") for stage in stages_of(packed)]
    assert [int(words[0]) >> 14 & 1 for words in stages] == [0, 1, 0] and header.patches > 0
    decoded = {0: {}, 2: {}}
    ends = {0: 8208 // 4, 2: 8208 // 4}
    for s in decoded:
        read_s_plane(stages[s], decoded[s])
    for w in range(4):
        streams = {}
        for s, registers in decoded.items():
            head = stages[s]
            assert (int(head[w]) & 0x1FFF) == ends[s]
            start = ends[s] + (int(head[w]) >> 24)
            end = int(head[w + 1]) & 0x1FFF if w < 3 else len(head)
            words = Words(head[start:end])
            if not streams:
                for g in range(2):
                    for lane in [*range(32), *range(32)]:
                        streams[g, lane] = streams.get((g, lane), "") + words.take()
            for k in range(8):
                for lane in range(32):
                    for i in range(4):
                        pair, streams[k % 2, lane] = read_pair(streams[k % 2, lane], table)
                        registers[w, k, lane, i] |= (pair & 255) << 7 | (pair >> 8) << 23
                    # Two whole words less what was read: with 32 bits left or fewer, another word.
                    if len(streams[k % 2, lane]) <= 32:
                        streams[k % 2, lane] += words.take()
            ends[s] = min(start + words.at, end)
            apply_patches(head, w, int(head[w]) & 0x1FFF, registers)
    for s, registers in decoded.items():
        assert not stages[s][ends[s] :].any()
        assert_same(to_matrix(registers), bits[:, 128 * s : 128 * s + 128])


def test_archive_read_word_by_word():
    bits = content("some noise", (301, 401))
    packed = reference.pack(bits, "archive")
    header = reference.parse_header(packed)
    assert header.layout == "archive" and header.patches > 0
    table = decoder(header.code)
    n = bits.size
    chunk = packed.reshape(-1)[header.data_offset : header.used_bytes]
    patches, count, *zeros = chunk[:16].view("<u4").tolist()
    assert zeros == [0, 0] and patches == header.patches
    positions = 16 + -(-n // 16) * 16
    pairs_at = positions + 4 * patches
    words_at = pairs_at + -(-patches // 2) * 4
    words = Words(chunk[words_at : words_at + 4 * count].view("<u4"))
    assert chunk.size == -(-(words_at + 4 * count) // 16) * 16
    streams = [words.take() for _ in range(64)]
    streams = [stream + words.take() for stream in streams]
    pairs = []
    while len(pairs) < -(-n // 2):
        for s in [*range(64), *range(64)]:
            pair, streams[s] = read_pair(streams[s], table)
            pairs.append(pair)
        for s in range(64):
            if len(streams[s]) <= 32:
                streams[s] += words.take()
    assert words.at >= count
    patched = chunk[pairs_at : pairs_at + 2 * patches].view("<u2").tolist()
    for position, pair in zip(chunk[positions:pairs_at].view("<u4").tolist(), patched, strict=True):
        pairs[position] = pair
    exponents = np.array([e for pair in pairs for e in (pair & 255, pair >> 8)][:n], np.uint16)
    assert n % 2 == 1 and pairs[-1] & 255 == pairs[-1] >> 8
    sm = chunk[16 : 16 + n].astype(np.uint16)
    assert_same(((sm & 0x80) << 8 | exponents << 7 | sm & 0x7F).reshape(bits.shape), bits)


def test_archive_chunks():
    # 64 rows of 16400 columns are 2^20 and a bit: two whole chunks and one row.
    bits = content("trained", (129, 16400))
    packed = reference.pack(bits, "archive")
    header = reference.parse_header(packed)
    index = packed.reshape(-1)[header.index_offset :][:16].view("<u4")
    assert index[0] == 0 and 16 * index[3] == header.used_bytes - header.data_offset
    assert 16 * index[1] > 64 * 16400 and 16 * (index[3] - index[2]) < 2 * 16400
    assert_same(reference.unpack(packed), bits)


def cost(weights: list[int], lengths: list[int]) -> int:
    return sum(w * length for w, length in zip(weights, lengths, strict=True))


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(1, 60), min_size=2, max_size=6), longest=st.integers(3, 5))
def test_package_merge_is_optimal(values, longest):
    values = sorted(values, reverse=True)
    lengths = reference_code.package_merge(np.array(values), longest).tolist()
    assert lengths == sorted(lengths) and max(lengths) <= longest
    every = itertools.combinations_with_replacement(range(1, longest + 1), len(values))
    best = min(cost(values, tried) for tried in every if sum(2.0**-length for length in tried) <= 1)
    assert cost(values, lengths) == best


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 4096), seed=st.integers(0, 2**32 - 1), layout=st.sampled_from(["huffman", "archive"]))
def test_code_is_complete_and_canonical(n, seed, layout):
    rng = np.random.default_rng(seed)
    counts = np.zeros(65536, np.int64)
    counts[rng.choice(65536, n, replace=False)] = np.exp(rng.uniform(0, 20, n)).astype(np.int64) + 1
    code = reference.build_code(counts, layout)
    longest, rarest = {"huffman": (8, 12), "archive": (12, 17)}[layout]
    assert code.lengths.max() <= longest and (np.diff(code.lengths) >= 0).all()
    assert (2.0**-code.lengths).sum() == (1 if len(code.pairs) > 1 else 0.5)
    kept = sorted(np.flatnonzero(counts * 2**rarest >= counts.sum()), key=lambda pair: (-counts[pair], pair))
    assert code.pairs.tolist() == [int(pair) for pair in kept[: 2**longest]]
    table = decoder(code)
    assert [int(bits, 2) for bits in table] == code.codes().tolist()
    pairs, lengths = code.lookup()
    for bits, pair in table.items():
        at = int(bits.ljust(longest, "0"), 2)
        span = 1 << longest - len(bits)
        assert (pairs[at : at + span] == pair).all() and (lengths[at : at + span] == len(bits)).all()
    again, size = reference_code.read_code(np.frombuffer(code.to_bytes(), np.uint8), longest)
    assert size == 32 + 2 * len(code.pairs) and np.array_equal(again.pairs, code.pairs)
    assert np.array_equal(again.lengths, code.lengths)


def test_nothing_is_frequent():
    counts = np.ones(65536, np.int64)
    counts[[300, 200]] = 2
    assert reference.build_code(counts, "huffman").pairs.tolist() == [200]
    assert len(reference.build_code(counts, "archive").pairs) == 4096


def test_bits_without_a_code_are_pair_0():
    code = reference.Code(8, np.array([0x7F7F], np.uint16), np.array([3]))
    pairs, lengths = code.lookup()
    assert (pairs[:32] == 0x7F7F).all() and (lengths[:32] == 3).all()
    assert (pairs[32:] == 0).all() and (lengths[32:] == 1).all()


def test_any_valid_table_decodes(monkeypatch):
    """Not the lengths that `pack` would write, and not all of the code space."""
    worse = reference.Code(8, np.array([0x7B7B, 0x7A7A, 0x7B7A], np.uint16), np.array([2, 5, 8]))
    monkeypatch.setattr(reference, "build_code", lambda counts, layout: worse)
    bits = 0x3D00 | content("any bits", (64, 256)) & 0x80FF
    packed = reference.pack(bits, "huffman")
    header = reference.parse_header(packed)
    assert header.layout == "raw" or header.code.pairs.tolist() == worse.pairs.tolist()
    bits = np.where(np.arange(256) < 128, 0x3D80 | bits & 0x7F, bits)
    packed = reference.pack(bits, "huffman")
    assert reference.parse_header(packed).code.lengths.tolist() == [2, 5, 8]
    assert_same(reference.unpack(packed), bits)
