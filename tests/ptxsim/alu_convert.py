"""cvt: between integers and floating-point numbers."""

import numpy as np

from .alu_round import add_to_odd, decode, encode, flush
from .alu_types import FLOATS, INTEGERS, MASKS, SIGNED, Lanes, Modifiers, Operation, wide

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
LARGEST = {"f32": 3.4028234663852886e38, "f16": 65504.0, "bf16": 3.3895313892515355e38}


def _limits(type_name: str) -> tuple[int, int]:
    bits = 8 * INTEGERS[type_name]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if type_name in SIGNED else (0, (1 << bits) - 1)


def _from_integer(value: np.ndarray) -> np.ndarray:
    """int64 or uint64 → float64 rounded to odd."""
    high, low = value >> value.dtype.type(32), value & value.dtype.type(0xFFFFFFFF)
    return add_to_odd(high.astype(np.float64) * 2.0**32, low.astype(np.float64))


def _integer_to_integer(mods: Modifiers, target: str, source: str, saturate: bool) -> Operation:
    value, mask = wide(source), MASKS[INTEGERS[target]]
    if target == "s8":
        raise mods.error("how far s8 is sign-extended depends on the register: not known to the interpreter")
    if not saturate and (source not in SIGNED or INTEGERS[target] <= INTEGERS[source]):
        mask = MASKS[min(INTEGERS[target], INTEGERS[source])]
        return lambda a: a & mask
    if not saturate:
        return lambda a: value(a).view(np.uint64) & mask
    low, high = _limits(target)
    kind = np.int64 if source in SIGNED else np.uint64
    allowed = np.iinfo(kind)
    low, high = max(low, int(allowed.min)), min(high, int(allowed.max))
    return lambda a: np.clip(value(a), kind(low), kind(high)).view(np.uint64) & mask


def _float_to_integer(target: str, source: str, rounding: str, ftz: bool) -> Operation:
    read, round_ = decode(source), TO_INTEGER[rounding]
    low, high = _limits(target)
    clean = flush(source) if ftz and source != "f64" else lambda a: a
    # NaN gives 0, or for 64 bits (and from f64) the lowest signed value.
    nan = 0 if source != "f64" and INTEGERS[target] < 8 else 1 << 8 * INTEGERS[target] - 1
    kind = np.int64 if target in SIGNED else np.uint64
    bound = float(high + 1)  # a power of two: exact

    def convert(a: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            x = round_(read(clean(a)))
            inside = np.where((x >= low) & (x < bound), x, 0.0).astype(kind).view(np.uint64)
        result = np.where(x >= bound, np.uint64(high), np.where(x < low, np.int64(low).view(np.uint64), inside))
        return np.where(np.isnan(x), np.uint64(nan), result) & MASKS[INTEGERS[target]]

    return convert


def _write_float(mods: Modifiers, target: str, mode: str):
    """float64 → bits, with .sat, .relu and .satfinite before."""
    saturate, relu, finite = mods.flag("sat"), mods.flag("relu"), mods.flag("satfinite")
    write = encode(target, mode)

    def to_bits(value: np.ndarray) -> Lanes:
        if saturate:
            value = np.where(np.isnan(value), 0.0, np.clip(value, 0.0, 1.0))
        if relu:
            value = np.where(value < 0, 0.0, value)
        if finite:
            value = np.clip(value, -LARGEST[target], LARGEST[target])
        return write(value)

    return to_bits


def _to_double(read, to_bits) -> Operation:
    def convert(a: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            return to_bits(read(a))

    return convert


def _pair(mods: Modifiers, target: str) -> Operation:
    """Two f32: the first into the upper half."""
    mode = mods.choice("rn", "rz")
    read, to_bits = decode("f32"), _write_float(mods, target, mode)
    mods.done()
    shift = np.uint64(16)

    def convert(upper: Lanes, lower: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            return (to_bits(read(upper)) << shift) | to_bits(read(lower))

    return convert


def build(mods: Modifiers) -> Operation:
    numbers = (*INTEGERS, *FLOATS)
    source = mods.type(*numbers)
    target = mods.type(*numbers, "f16x2", "bf16x2")
    if target.endswith("x2"):
        if source != "f32":
            raise mods.error("packs f32 only")
        return _pair(mods, target[:-2])
    if target in INTEGERS and source in INTEGERS:
        saturate = mods.flag("sat")
        mods.done()
        return _integer_to_integer(mods, target, source, saturate)
    ftz = mods.flag("ftz")
    if target in INTEGERS:
        rounding = mods.choice(*TO_INTEGER)
        mods.flag("sat")  # to an integer it always saturates
        mods.done()
        return _float_to_integer(target, source, rounding, ftz)
    to_integral = TO_INTEGER.get(mods.choice(*TO_INTEGER, default="no"))
    mode = mods.choice(*ROUNDINGS, default="rn")
    if target == "f64" and source in ("s64", "u64"):
        raise mods.error("64-bit integers to f64 are not known to the interpreter")
    if mode == "rna" and target != "bf16":
        raise mods.error("rna is only for bf16 here")
    to_bits = _write_float(mods, target, mode)
    mods.done()
    if source in INTEGERS:
        value = wide(source)
        return _to_double(lambda a: _from_integer(value(a)), to_bits)
    read = decode(source)
    clean_in = flush(source) if ftz and source == "f32" else lambda a: a
    clean_out = flush(target) if ftz and target == "f32" else lambda a: a
    number = (lambda a: to_integral(read(clean_in(a)))) if to_integral else lambda a: read(clean_in(a))
    return _to_double(number, lambda value: clean_out(to_bits(value)))
