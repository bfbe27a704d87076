"""Values for the interpreter's arithmetic, and one instruction run on them."""

import functools
import struct

import numpy as np
from hypothesis import strategies as st
from ptxsim import alu

LANES = 8  # different ones; a warp repeats them
each = functools.partial(zip, strict=True)


def warp(values: list[int]) -> np.ndarray:
    return np.resize(np.array([v & (1 << 64) - 1 for v in values], np.uint64), 32)


def words(bits: int):
    """Patterns of so many bits, with more of those that carry, overflow or end a range."""
    edges = [0, 1, 2, 31, 32, 33, 63, 64, 255, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1, 1 << bits // 2]
    one = st.one_of(st.sampled_from([e & (1 << bits) - 1 for e in edges]), st.integers(0, (1 << bits) - 1))
    return st.lists(one, min_size=LANES, max_size=LANES)


def floats(type_name: str):
    bits = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[type_name]
    top, one, least_normal, infinity = {
        "f16": (0x8000, 0x3C00, 0x0400, 0x7C00),
        "bf16": (0x8000, 0x3F80, 0x0080, 0x7F80),
        "f32": (1 << 31, 0x3F800000, 0x00800000, 0x7F800000),
        "f64": (1 << 63, 0x3FF << 52, 1 << 52, 0x7FF << 52),
    }[type_name]
    near = [0, 1, one, one + 1, one - 1, least_normal, least_normal - 1, infinity, infinity - 1, infinity + 1]
    pattern = st.one_of(
        st.sampled_from(near + [n | top for n in near]),
        st.integers(0, (1 << bits) - 1),
        st.integers(one - (one >> 4), one + (one >> 4)),
    )
    return st.lists(pattern, min_size=LANES, max_size=LANES)


def run(text: str, *sources: list[int], destinations: int = 1):
    opcode, *modifiers = text.split(".")
    result = alu.compile_op(opcode, tuple(modifiers), destinations)(*map(warp, sources))
    if isinstance(result, tuple):
        return [tuple(int(r[i]) for r in result) for i in range(len(sources[0]))]
    assert result.dtype == np.uint64 and result.shape == (32,)
    return [int(v) for v in result[: len(sources[0])]]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def of_type(value: int, type_name: str) -> int:
    bits = int(type_name[1:])
    return signed(value, bits) if type_name[0] == "s" else value & (1 << bits) - 1


def to_number(bits: int, type_name: str) -> float:
    if type_name == "f64":
        return struct.unpack("d", struct.pack("Q", bits))[0]
    if type_name == "f32":
        return struct.unpack("f", struct.pack("I", bits))[0]
    if type_name == "bf16":
        return struct.unpack("f", struct.pack("I", bits << 16))[0]
    return struct.unpack("e", struct.pack("H", bits))[0]
