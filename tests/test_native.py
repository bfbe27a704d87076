"""What host and device share, on the host: tile order, bit merges, code streams, and the tests' Device."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_module import build, native
from samples import LAYOUTS, weight

from unweight_ext import info, pack, reference_code, reference_tiles

WORDS = st.integers(0, 2**32 - 1)
EXPONENTS = 0x7F807F80


def test_fragments_are_in_the_order_of_the_specification() -> None:
    rows, columns = np.mgrid[:64, :128]
    where = {"row": rows, "column": columns}
    expected = {name: reference_tiles.to_registers(a.astype(np.uint16)) & 0xFFFF for name, a in where.items()}
    for warp, kstep, lane, reg in np.ndindex(4, 8, 32, 4):
        at = 0, 0, warp, kstep, lane, reg
        assert native.fragment_row(warp, lane, reg) == expected["row"][at]
        assert native.fragment_column(kstep, lane, reg) == expected["column"][at]


@pytest.mark.parametrize("shape", [(1, 1), (64, 8192), (4096, 4096), (16384, 4096), (32768, 8192), (65, 200000)])
def test_segments_are_those_of_the_specification(shape: tuple[int, int]) -> None:
    assert native.segment_stages(*shape) == reference_tiles.segment_stages(*shape)


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_nibbles_become_registers(registers: list[int], codes: list[int]) -> None:
    exponents = [(112 + lo) << 7 | (112 + hi) << 23 for lo, hi in zip(codes[::2], codes[1::2], strict=True)]
    expected = [r & ~EXPONENTS & 0xFFFFFFFF | e for r, e in zip(registers, exponents, strict=True)]
    s0, s1 = (native.merge_signs_mantissas(*registers[i : i + 2]) for i in (0, 2))
    word = native.encode_nibbles([lo << 7 | hi << 23 for lo, hi in zip(codes[::2], codes[1::2], strict=True)])
    assert native.decode_nibbles(word, s0, s1) == expected


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(st.integers(0, 65535), min_size=4, max_size=4))
def test_entries_become_registers(registers: list[int], pairs: list[int]) -> None:
    entries = [native.make_code_entry(pair, 8) for pair in pairs]
    expected = [r & ~EXPONENTS & 0xFFFFFFFF | e & EXPONENTS for r, e in zip(registers, entries, strict=True)]
    assert [e & EXPONENTS for e in entries] == [(p & 255) << 7 | (p >> 8) << 23 for p in pairs]
    s0, s1 = (native.merge_signs_mantissas(*registers[i : i + 2]) for i in (0, 2))
    assert native.merge_entries(entries, s0, s1) == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 400))
def test_streams_are_decoded(seed: int, steps: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros(65536, np.int64)
    counts[rng.choice(65536, pairs, replace=False)] = 2 ** rng.integers(0, 20, pairs)
    code = reference_code.build_code(counts, "huffman")
    table = [native.make_code_entry(*map(int, entry)) for entry in zip(*code.lookup(), strict=True)]
    codes = [f"{value:0{length}b}" for value, length in zip(code.codes(), code.lengths, strict=True)]

    place = rng.integers(0, len(codes), 4 * steps)
    bits = "".join(codes[p] for p in place)
    bits += "0" * (64 + -len(bits) % 32)  # two words are always taken ahead
    words = [int(bits[i : i + 32], 2) for i in range(0, len(bits), 32)]
    expected = [native.make_code_entry(int(code.pairs[p]), int(code.lengths[p])) for p in place]
    assert [entry for step in native.decode_stream(table, words, steps) for entry in step] == expected


class Memory:
    """A device of plain memory, whose kernels copy the first half of a buffer to the second."""

    def __init__(self) -> None:
        self.bytes, self.launches = bytearray(), []

    def multiprocessors(self) -> int:
        return 3

    def allocate(self, nbytes: int, name: str) -> int:
        assert name == "probe"
        self.bytes += b"?" * nbytes
        return 2**63 + len(self.bytes) - nbytes

    def clear(self, address: int, nbytes: int) -> None:
        self.upload(address, bytes(nbytes))

    def upload(self, address: int, data: bytes) -> None:
        self.bytes[address - 2**63 : address - 2**63 + len(data)] = data

    def download(self, address: int, nbytes: int) -> bytes:
        return bytes(self.bytes[address - 2**63 :][:nbytes])

    def launch(
        self, kernel: str, grid: int, block: int, shared_bytes: int, argument: bytes, programmatic: bool
    ) -> None:
        self.launches.append((kernel, grid, block, shared_bytes, programmatic))
        where, size = struct.unpack("<QI4x", argument)
        self.upload(where + size, self.download(where, size))


def test_drivers_run_on_a_device_of_python() -> None:
    device = Memory()
    assert native.probe_device(device, "unweight_copy", b"abc") == b"abcabc"
    assert device.launches == [("unweight_copy", 3, 32, 1024, False)]


def test_errors_of_the_device_pass_through_the_drivers() -> None:
    device = Memory()
    device.download = lambda address, nbytes: b""
    with pytest.raises(native.Error, match="^download: got 0 bytes, expected 6"):
        native.probe_device(device, "unweight_copy", b"abc")
    device.launch = lambda *plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        native.probe_device(device, "unweight_copy", b"abc")


def test_a_second_build_compiles_nothing() -> None:
    module = build()
    before = module.stat().st_mtime_ns
    assert build() == module and module.stat().st_mtime_ns == before


class Bytes:
    """A device that holds one tensor and counts what is read of it."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.bytes, self.read = packed.numpy().tobytes(), 0

    def download(self, address: int, nbytes: int) -> bytes:
        assert address + nbytes <= len(self.bytes), "read behind the tensor"
        self.read += nbytes
        return self.bytes[address : address + nbytes]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_read_without_the_data(layout: str) -> None:
    packed = pack(weight("trained", 200, 384), layout)
    about, device = info(packed), Bytes(packed)
    assert native.read_head(device, 0, packed.numel()) == (LAYOUTS.index(layout), 384, about.used_bytes)
    assert device.read < 8192 < packed.numel()


HEAD = pack(weight("trained", 64, 256), "huffman")


@given(st.data())
def test_damaged_heads_are_refused_or_read_within_the_tensor(data: st.DataObject) -> None:
    packed = HEAD.flatten()[: data.draw(st.sampled_from([0, 1, 127, 128, 159, 160, 700, HEAD.numel()]))].clone()
    for _ in range(data.draw(st.integers(0, 3))):
        if len(packed):
            packed[data.draw(st.integers(0, min(len(packed), 800) - 1))] = data.draw(st.integers(0, 255))
    device = Bytes(packed)
    try:
        native.read_head(device, 0, len(packed))
    except native.Error as error:
        assert str(error).startswith("packed: ")
