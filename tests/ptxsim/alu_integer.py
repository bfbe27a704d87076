"""Integer arithmetic: everything wraps at the type's width unless .sat says otherwise."""

import numpy as np

from .alu_types import (
    BITS,
    INTEGERS,
    MASKS,
    PACKED,
    SIGNED,
    Lanes,
    Modifiers,
    Operation,
    by_halves,
    in_order,
    lanes_of,
    narrow,
    wide,
)

ARITHMETIC = tuple(t for t in INTEGERS if not t.endswith("8") and t not in BITS)

NOTHING = np.uint64(0)


def _clamped(type_name: str):
    limits = np.iinfo(np.dtype(f"i{INTEGERS[type_name]}"))
    return lambda exact: lanes_of(np.clip(exact, limits.min, limits.max).astype(limits.dtype))


def _add_or_subtract(mods: Modifiers) -> Operation:
    packed = mods.parts[-1] in PACKED
    type_name = mods.type(*ARITHMETIC, "u16x2", "s16x2", "b32", "b64")
    saturate, carry_out = mods.flag("sat"), mods.flag("cc")
    mods.done()
    ufunc = np.add if mods.opcode == "add" else np.subtract
    element = PACKED.get(type_name, type_name)
    mask = MASKS[INTEGERS[element]]
    if saturate and element not in ("s32", "s16"):
        raise mods.error("saturates only for s32 (and s16x2)")
    if carry_out:
        return _with_carry(mods.opcode, INTEGERS[type_name], carry_in=False, carry_out=True)
    if saturate:
        value, clamp = wide(element), _clamped(element)
        plain = lambda a, b: clamp(ufunc(value(a), value(b)))  # noqa: E731
    else:
        plain = lambda a, b: ufunc(a, b) & mask  # noqa: E731
    return by_halves(plain) if packed else plain


def _with_carry(opcode: str, size: int, carry_in: bool, carry_out: bool) -> Operation:
    """add/sub on the condition code register: its lanes are the last source and the second result."""
    mask = MASKS[size]
    top = np.uint64(8 * size - 1)

    def add(a: Lanes, b: Lanes, carry: Lanes = NOTHING):
        a, b = a & mask, b & mask
        total = (a + b + carry) & mask
        # The carry out of the top bit, from the top bits of both terms and of the sum.
        return (total, (((a & b) | ((a | b) & ~total)) >> top) & np.uint64(1)) if carry_out else total

    def subtract(a: Lanes, b: Lanes, borrow: Lanes = NOTHING):
        a, b = a & mask, b & mask
        total = (a - b - borrow) & mask
        return (total, (((~a & b) | ((~a | b) & total)) >> top) & np.uint64(1)) if carry_out else total

    operation = add if opcode.startswith("add") else subtract
    return operation if carry_in else lambda a, b: operation(a, b)


def _carrying(mods: Modifiers) -> Operation:
    type_name = mods.type("u32", "s32", "b32", "u64", "s64", "b64")
    carry_out = mods.flag("cc")
    mods.done()
    return _with_carry(mods.opcode, INTEGERS[type_name], carry_in=True, carry_out=carry_out)


def _high_64(a: Lanes, b: Lanes) -> Lanes:
    """The upper 64 bits of the unsigned product of 64-bit lanes."""
    low, shift = MASKS[4], np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + ((a0 * b0) >> shift)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> shift) + (other >> shift)


def _product(mods: Modifiers, part: str, type_name: str) -> Operation:
    size = INTEGERS[type_name]
    value, mask = wide(type_name), MASKS[size]
    if part == "lo":
        return lambda a, b: (a * b) & mask
    if part == "wide":
        if size == 8:
            raise mods.error("wide needs a type of 16 or 32 bits")
        if type_name not in SIGNED:
            return np.multiply
        double = MASKS[2 * size]
        return lambda a, b: (value(a) * value(b)).view(np.uint64) & double
    if size < 8:
        shift = np.uint64(8 * size) if type_name not in SIGNED else np.int64(8 * size)
        return lambda a, b: (value(a) * value(b) >> shift).view(np.uint64) & mask
    if type_name not in SIGNED:
        return _high_64

    def signed_high(a: Lanes, b: Lanes) -> Lanes:
        negative_a, negative_b = a.view(np.int64) < 0, b.view(np.int64) < 0
        return _high_64(a, b) - np.where(negative_a, b, 0) - np.where(negative_b, a, 0)

    return signed_high


def _multiply(mods: Modifiers) -> Operation:
    type_name = mods.type(*ARITHMETIC)
    part = mods.choice("lo", "hi", "wide")
    mods.done()
    return _product(mods, part, type_name)


def _multiply_add(mods: Modifiers) -> Operation:
    type_name = mods.type(*ARITHMETIC)
    part = mods.choice("lo", "hi", "wide")
    carry_out, carry_in = mods.flag("cc"), mods.opcode == "madc"
    mods.done()
    product = _product(mods, part, type_name)
    size = INTEGERS[type_name] * (2 if part == "wide" else 1)
    if carry_in or carry_out:
        add = _with_carry("add", size, carry_in, carry_out)
        return lambda a, b, c, *carry: add(product(a, b), c, *carry)
    mask = MASKS[size]
    return lambda a, b, c: (product(a, b) + c) & mask


def _divide(mods: Modifiers) -> Operation:
    type_name = mods.type(*ARITHMETIC)
    mods.done()
    value, quotient = narrow(type_name), mods.opcode == "div"
    size = INTEGERS[type_name]
    ufunc, mask = np.floor_divide if quotient else np.remainder, MASKS[size]

    def divide_unsigned(a: Lanes, b: Lanes) -> Lanes:
        result = ufunc(a, np.maximum(b, np.uint64(1)))
        nothing = b == 0
        return np.where(nothing, mask if quotient else a, result) if nothing.any() else result

    if type_name not in SIGNED:
        return divide_unsigned

    def divide(a: Lanes, b: Lanes) -> Lanes:
        # Magnitudes, since numpy rounds quotients down and PTX toward zero. A division by zero gives all ones.
        x, y = value(a), value(b)
        negative_x, negative_y = x < 0, y < 0
        unsigned = np.dtype(f"u{size}")
        p = np.where(negative_x, -x, x).view(unsigned).astype(np.uint64)
        q = np.where(negative_y, -y, y).view(unsigned).astype(np.uint64)
        safe = np.where(q == 0, np.uint64(1), q)
        result = ufunc(p, safe)
        flip = negative_x ^ negative_y if quotient else negative_x
        result = np.where(flip, np.uint64(0) - result, result)
        return np.where(q == 0, ~np.uint64(0) if quotient else a, result) & mask

    return divide


def _minimum_or_maximum(mods: Modifiers) -> Operation:
    packed = mods.parts[-1] in PACKED
    type_name = mods.type(*ARITHMETIC, "u16x2", "s16x2")
    relu = mods.flag("relu")
    mods.done()
    value = in_order(PACKED.get(type_name, type_name))
    ufunc = np.minimum if mods.opcode == "min" else np.maximum
    if relu and "s" not in type_name:
        raise mods.error("relu needs a signed type")
    if relu:
        plain = lambda a, b: lanes_of(np.maximum(ufunc(value(a), value(b)), 0))  # noqa: E731
    else:
        plain = lambda a, b: lanes_of(ufunc(value(a), value(b)))  # noqa: E731
    return by_halves(plain) if packed else plain


def _absolute_or_negative(mods: Modifiers) -> Operation:
    value = narrow(mods.type("s16", "s32", "s64"))
    mods.done()
    ufunc = np.absolute if mods.opcode == "abs" else np.negative
    return lambda a: lanes_of(ufunc(value(a)))


def _sum_of_difference(mods: Modifiers) -> Operation:
    type_name = mods.type(*ARITHMETIC)
    mods.done()
    value, mask = narrow(type_name), MASKS[INTEGERS[type_name]]

    def sad(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        x, y = value(a), value(b)
        return (lanes_of(np.where(x < y, y - x, x - y)) + c) & mask

    return sad


def _dot_product(mods: Modifiers) -> Operation:
    """dp4a: four bytes by four bytes; dp2a: two halves of a by the low or high two bytes of b."""
    type_b, type_a = mods.type("u32", "s32"), mods.type("u32", "s32")
    four = mods.opcode == "dp4a"
    first = 0 if four or mods.choice("lo", "hi") == "lo" else 2
    mods.done()
    part_a = np.dtype(("i" if type_a == "s32" else "u") + ("1" if four else "2"))
    part_b = np.dtype(("i" if type_b == "s32" else "u") + "1")
    terms = 4 if four else 2

    def dot(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        x = a.astype(np.uint32).view(part_a).reshape(-1, terms).astype(np.int64)
        y = b.astype(np.uint32).view(part_b).reshape(-1, 4)[:, first : first + terms].astype(np.int64)
        return (np.einsum("ij,ij->i", x, y).view(np.uint64) + c) & MASKS[4]

    return dot


BUILDERS = {
    "add": _add_or_subtract,
    "sub": _add_or_subtract,
    "addc": _carrying,
    "subc": _carrying,
    "mul": _multiply,
    "mad": _multiply_add,
    "madc": _multiply_add,
    "div": _divide,
    "rem": _divide,
    "min": _minimum_or_maximum,
    "max": _minimum_or_maximum,
    "abs": _absolute_or_negative,
    "neg": _absolute_or_negative,
    "sad": _sum_of_difference,
    "dp4a": _dot_product,
    "dp2a": _dot_product,
}
