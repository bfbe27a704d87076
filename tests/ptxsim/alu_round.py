"""Floating-point numbers of PTX and their rounding.

Values are float64 here: exact for every narrower type. A result that float64 can't hold is *rounded to odd* (an inexact
one gets an odd last bit), which makes a second rounding to a type of at most 50 bits as good as one rounding.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .alu_types import Lanes, lanes_of

NAN_BITS = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
_SIGN = {"f16": np.uint64(1 << 15), "bf16": np.uint64(1 << 15), "f32": np.uint64(1 << 31), "f64": np.uint64(1 << 63)}


def sign_of(type_name: str) -> np.uint64:
    """The sign bit of a type."""
    return _SIGN[type_name]


def decode(type_name: str) -> Callable[[Lanes], np.ndarray]:
    """Bits → float64 values, exactly."""
    if type_name == "f64":
        return lambda bits: bits.view(np.float64)
    if type_name == "f32":
        return lambda bits: bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if type_name == "f16":
        return lambda bits: bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """A float64 rounded to nearest, and what it misses → rounded to odd."""
    odd = (value.view(np.int64) & 1) == 1
    keep = odd | (error == 0) | ~np.isfinite(value)
    return np.where(keep, value, np.nextafter(value, np.copysign(np.inf, error)))


def add_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of float64 numbers, rounded to odd (Knuth's two-sum gives the error exactly)."""
    total = a + b
    b_part = total - a
    return to_odd(total, (a - (total - b_part)) + (b - b_part))


def fraction_to_odd(exact: Fraction) -> float:
    """A fraction within float64's normal range, rounded to odd."""
    near = float(exact)
    missing = exact - Fraction(near)
    return float(to_odd(np.array(near), np.array(float(np.sign(missing)))))


def _directed(value: np.ndarray, kind: type[np.floating], mode: str) -> np.ndarray:
    """As `kind`, by mode rn, rm, rp or rz."""
    near = value.astype(kind)
    if mode == "rn":
        return near
    back = near.astype(np.float64)
    if mode == "rm":
        return np.where(back > value, np.nextafter(near, kind(-np.inf)), near)
    if mode == "rp":
        return np.where(back < value, np.nextafter(near, kind(np.inf)), near)
    return np.where(np.abs(back) > np.abs(value), np.nextafter(near, kind(0)), near)


def _to_single(value: np.ndarray, mode: str) -> np.ndarray:
    if mode != "odd":
        return _directed(value, np.float32, mode)
    cut = _directed(value, np.float32, "rz")
    inexact = (cut.astype(np.float64) != value) & ~np.isnan(value)
    return np.where(inexact, cut.view(np.uint32) | np.uint32(1), cut.view(np.uint32)).view(np.float32)


def _to_half(value: np.ndarray, mode: str) -> np.ndarray:
    return _directed(value, np.float16, mode)


def _to_bfloat(value: np.ndarray, mode: str) -> np.ndarray:
    bits = _to_single(value, "odd").view(np.uint32)
    negative = (bits >> 31).astype(bool)
    if mode == "rn":
        rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode == "rna":
        rounding = np.uint32(0x8000)
    else:
        away = {"rz": False, "rm": negative, "rp": ~negative}[mode]
        rounding = np.where(away, np.uint32(0xFFFF), np.uint32(0))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def encode(type_name: str, mode: str = "rn") -> Callable[[np.ndarray], Lanes]:
    """float64 values (rounded to odd) → bits of the type, rounded by the mode; a NaN becomes the canonical one."""
    if type_name == "f64":
        return lambda value: value.view(np.uint64)
    nan = np.uint64(NAN_BITS[type_name])
    rounded = {"f32": _to_single, "f16": _to_half, "bf16": _to_bfloat}[type_name]

    def to_bits(value: np.ndarray) -> Lanes:
        with np.errstate(all="ignore"):
            bits = lanes_of(rounded(value, mode))
            missing = np.isnan(value)
        return np.where(missing, nan, bits) if missing.any() else bits

    return to_bits


def flush(type_name: str) -> Callable[[Lanes], Lanes]:
    """.ftz: subnormal bits become a zero of the same sign."""
    exponent = np.uint64({"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}[type_name])
    sign = sign_of(type_name)
    return lambda bits: np.where(bits & exponent == 0, bits & sign, bits)
