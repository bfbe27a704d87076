"""setp, set, selp, slct: comparisons and choices."""

import numpy as np

from .alu_round import decode, encode, flush
from .alu_types import FLOATS, INTEGERS, Lanes, Modifiers, Operation, in_order, narrow

_INTEGER = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _unordered(test):
    return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)


_FLOAT = {
    **{name: _INTEGER[name] for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    **{name + "u": _unordered(_INTEGER[name]) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_COMBINE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _comparison(mods: Modifiers, type_name: str) -> Operation:
    """(a, b) → uint64 0 or 1."""
    if type_name in INTEGERS:
        name = mods.choice(*_INTEGER)
        if name in ("eq", "ne"):
            type_name = type_name.replace("s", "u")
        test, read = _INTEGER[name], in_order(type_name)
    else:
        test, decoded = _FLOAT[mods.choice(*_FLOAT)], decode(type_name)
        clean = flush(type_name) if mods.flag("ftz") else None
        read = (lambda a: decoded(clean(a))) if clean else decoded
    if type_name in INTEGERS:
        return lambda a, b: test(read(a), read(b)).astype(np.uint64)

    def compare(a: Lanes, b: Lanes) -> Lanes:
        with np.errstate(invalid="ignore"):
            return test(read(a), read(b)).astype(np.uint64)

    return compare


def build_setp(mods: Modifiers, destinations: int) -> Operation:
    halves = mods.parts[-1] in ("f16x2", "bf16x2")
    type_name = mods.type(*INTEGERS, *FLOATS, "f16x2", "bf16x2")
    compare = _comparison(mods, type_name[:-2] if halves else type_name)
    combine = _COMBINE.get(mods.choice(*_COMBINE, default="no"))
    mods.done()
    one = np.uint64(1)
    if halves:  # p of the low halves, q of the high ones
        shift = np.uint64(16)
        first, second = compare, lambda a, b: compare(a >> shift, b >> shift)
    else:
        first, second = compare, lambda a, b: compare(a, b) ^ one

    if destinations == 1:
        return (lambda a, b, c: combine(first(a, b), c)) if combine else first
    if combine:
        return lambda a, b, c: (combine(first(a, b), c), combine(second(a, b), c))
    return lambda a, b: (first(a, b), second(a, b))


def _set(mods: Modifiers) -> Operation:
    source = mods.type(*INTEGERS, *FLOATS)
    target = mods.type("u32", "s32", "b32", "f32")
    compare = _comparison(mods, source)
    combine = _COMBINE.get(mods.choice(*_COMBINE, default="no"))
    mods.done()
    true = encode("f32")(np.ones(1))[0] if target == "f32" else np.uint64(0xFFFFFFFF)
    if combine:
        return lambda a, b, c: combine(compare(a, b), c) * true
    return lambda a, b: compare(a, b) * true


def _select(mods: Modifiers) -> Operation:
    mods.type(*INTEGERS, *FLOATS)
    mods.done()
    return lambda a, b, p: np.where(p, a, b)


def _select_by_sign(mods: Modifiers) -> Operation:
    by = mods.type("s32", "f32")
    mods.type(*INTEGERS, *FLOATS)
    mods.done()
    read = narrow("s32") if by == "s32" else decode("f32")
    return lambda a, b, c: np.where(read(c) >= 0, a, b)


BUILDERS = {"set": _set, "selp": _select, "slct": _select_by_sign}
