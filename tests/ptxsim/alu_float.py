"""Floating-point arithmetic: f32, f16, bf16, the packed pairs, and what of f64 is exact in numpy."""

from fractions import Fraction

import numpy as np

from .alu_round import NAN_BITS, add_to_odd, decode, encode, flush, fraction_to_odd, sign_of
from .alu_types import FLOATS, PACKED, Lanes, Modifiers, Operation, by_halves, lanes_of

ROUNDINGS = ("rn", "rz", "rm", "rp")
ALL = (*FLOATS, "f16x2", "bf16x2")


def _zero_sum(mode: str, total: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """Toward minus infinity, a sum that cancels to zero is -0."""
    if mode != "rm":
        return total
    all_positive = np.logical_and.reduce([~np.signbit(t) for t in terms])
    return np.where((total == 0) & ~all_positive, -0.0, total)


def _sum(mode: str, sign: float) -> Operation:
    return lambda a, b: _zero_sum(mode, add_to_odd(a, sign * b), a, sign * b)


def _fused(mode: str) -> Operation:
    def fma(a, b, c):
        product = a * b  # exact: at most 48 bits
        return _zero_sum(mode, add_to_odd(product, c), product, c)

    return fma


def _exact_double_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    plain = a * b + c
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(a[lane]) * Fraction(b[lane]) + Fraction(c[lane])
        if exact != 0:
            try:
                plain[lane] = float(exact)
            except OverflowError:
                plain[lane] = np.inf if exact > 0 else -np.inf
    return plain


def _with_options(mods: Modifiers, type_name: str, compute, mode: str) -> Operation:
    """Decoding, the computation on float64, rounding; .ftz, .sat and .relu around them."""
    ftz, saturate, relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    mods.done()
    read, write = decode(type_name), encode(type_name, mode)
    clean = flush(type_name) if ftz and type_name != "f64" else None

    def operation(*bits: Lanes) -> Lanes:
        if clean:
            bits = [clean(b) for b in bits]
        with np.errstate(all="ignore"):
            value = compute(*map(read, bits))
            if saturate:
                value = np.where(np.isnan(value), 0.0, np.clip(value, 0.0, 1.0))
            if relu:
                value = np.where(value < 0, 0.0, value)
            result = write(value)
        return clean(result) if clean else result

    return operation


def _arithmetic(mods: Modifiers) -> Operation:
    packed = mods.parts[-1] in PACKED
    whole = mods.type(*ALL)
    type_name = PACKED.get(whole, whole)
    mode = mods.choice(*ROUNDINGS, default="rn")
    if type_name == "f64":
        if mode != "rn":
            raise mods.error("f64 is rounded to nearest only")
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _exact_double_fma}[
            "fma" if mods.opcode == "mad" else mods.opcode
        ]
    else:
        compute = {
            "add": _sum(mode, 1.0),
            "sub": _sum(mode, -1.0),
            "mul": np.multiply,
            "fma": _fused(mode),
            "mad": _fused(mode),
        }[mods.opcode]
    if whole == "f32" and mode == "rn" and mods.opcode in _SINGLE and not mods.left():
        return _single(_SINGLE[mods.opcode])
    operation = _with_options(mods, type_name, compute, mode)
    return by_halves(operation) if packed else operation


# The processor rounds these as PTX does.
_SINGLE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _single(ufunc) -> Operation:
    def operation(a: Lanes, b: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            value = ufunc(a.astype(np.uint32).view(np.float32), b.astype(np.uint32).view(np.float32))
        bits = lanes_of(value)
        missing = np.isnan(value)
        return np.where(missing, np.uint64(NAN_BITS["f32"]), bits) if missing.any() else bits

    return operation


def _minimum_or_maximum(mods: Modifiers) -> Operation:
    packed = mods.parts[-1] in PACKED
    whole = mods.type(*ALL)
    type_name = PACKED.get(whole, whole)
    keep_nan = mods.flag("NaN")
    largest = mods.opcode == "max"

    def pick(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # -0 is less than +0, and one NaN loses against a number unless .NaN says otherwise.
        less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
        chosen = np.where(less, b, a) if largest else np.where(less, a, b)
        chosen = np.where(np.isnan(a), b, np.where(np.isnan(b), a, chosen))
        return np.where(np.isnan(a) | np.isnan(b), np.nan, chosen) if keep_nan else chosen

    operation = _with_options(mods, type_name, pick, "rn")
    return by_halves(operation) if packed else operation


def _absolute_or_negative(mods: Modifiers) -> Operation:
    whole = mods.type(*ALL)
    type_name = PACKED.get(whole, whole)
    ftz = mods.flag("ftz")
    mods.done()
    sign = sign_of(type_name)
    if whole in PACKED:
        sign |= sign << np.uint64(16)
    absolute = mods.opcode == "abs"
    operation = (lambda a: a & ~sign) if absolute else (lambda a: a ^ sign)
    if ftz:
        clean = by_halves(flush(type_name)) if whole in PACKED else flush(type_name)
        return lambda a: operation(clean(a))
    return operation


def _copy_sign(mods: Modifiers) -> Operation:
    sign = sign_of(mods.type("f32", "f64"))
    mods.done()
    return lambda a, b: (a & sign) | (b & ~sign)


def _exact_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = a / b
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)):
        result[lane] = fraction_to_odd(Fraction(a[lane]) / Fraction(b[lane]))
    return result


def _divide(mods: Modifiers) -> Operation:
    type_name = mods.type("f32", "f64")
    mode = mods.choice(*ROUNDINGS, "approx", "full", default="rn")
    if type_name == "f64" and mode != "rn":
        raise mods.error("f64 is rounded to nearest only")
    plain = type_name == "f64" or mode in ("approx", "full")
    return _with_options(mods, type_name, np.divide if plain else _exact_quotient, mode if mode in ROUNDINGS else "rn")


def _function(mods: Modifiers) -> Operation:
    """One argument. Of .approx the value rounded to nearest is given: within the error that PTX allows."""
    type_name = mods.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    packed = type_name in PACKED
    type_name = PACKED.get(type_name, type_name)
    mode = mods.choice(*ROUNDINGS, "approx", default="approx")
    if type_name == "f64" and mode in ("rz", "rm", "rp"):
        raise mods.error("f64 is rounded to nearest only")
    one = np.ones(64 if packed else 32)
    compute = {
        "rcp": (lambda x: np.divide(1.0, x))
        if mode == "approx" or type_name == "f64"
        else (lambda x: _exact_quotient(one[: len(x)], x)),
        # A square root of 24 bits is never so close to a rounding boundary that float64 would miss it.
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "ex2": np.exp2,
        "lg2": np.log2,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
    }[mods.opcode]
    operation = _with_options(mods, type_name, compute, mode if mode in ROUNDINGS else "rn")
    return by_halves(operation) if packed else operation


def _test_property(mods: Modifiers) -> Operation:
    read = decode(mods.type("f32", "f64"))
    kind = mods.choice("finite", "infinite", "number", "notanumber")
    mods.done()
    test = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
    }[kind]
    return lambda a: test(read(a)).astype(np.uint64)


BUILDERS = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "mad": _arithmetic,
    "min": _minimum_or_maximum,
    "max": _minimum_or_maximum,
    "abs": _absolute_or_negative,
    "neg": _absolute_or_negative,
    "copysign": _copy_sign,
    "div": _divide,
    "testp": _test_property,
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), _function),
}
