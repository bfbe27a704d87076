"""Logic, shifts, bit fields and permutations."""

import functools

import numpy as np

from .alu_types import BITS, MASKS, SIGNED, Lanes, Modifiers, Operation, lanes_of, narrow

WORDS = ("b32", "b64")
_Z = np.uint64


def _logic(mods: Modifiers) -> Operation:
    type_name = mods.type("pred", "b16", "b32", "b64")
    mods.done()
    mask = np.array(1, np.uint64) if type_name == "pred" else MASKS[BITS[type_name]]
    if mods.opcode == "not":
        return lambda a: ~a & mask
    if mods.opcode == "cnot":
        return lambda a: ((a & mask) == 0).astype(np.uint64)
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[mods.opcode]
    return lambda a, b: ufunc(a, b) & mask


# Functions of two bits by truth table: bit 2a + b of the index.
_OF_TWO = (
    lambda a, b: _Z(0),
    lambda a, b: ~(a | b),
    lambda a, b: ~a & b,
    lambda a, b: ~a,
    lambda a, b: a & ~b,
    lambda a, b: ~b,
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda a, b: b,
    lambda a, b: ~a | b,
    lambda a, b: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, b: ~_Z(0),
)


@functools.cache
def _of_three(table: int) -> Operation:
    """The function whose value for bits a, b, c is bit 4a + 2b + c of the table."""
    without_c = sum((table >> 2 * i & 1) << i for i in range(4))
    with_c = sum((table >> 2 * i + 1 & 1) << i for i in range(4))
    base, change = _OF_TWO[without_c], _OF_TWO[without_c ^ with_c]
    return lambda a, b, c: (base(a, b) ^ (c & change(a, b))) & MASKS[4]


def _lop3(mods: Modifiers) -> Operation:
    mods.type("b32")
    mods.done()
    return lambda a, b, c, table: _of_three(int(table[0]) & 0xFF)(a, b, c)


def _shift(mods: Modifiers) -> Operation:
    left = mods.opcode == "shl"
    type_name = mods.type(*("b16", *WORDS), *(() if left else ("u16", "u32", "u64", "s16", "s32", "s64")))
    mods.done()
    value, size = narrow(type_name), int(type_name[1:])
    low, limit = MASKS[4], _Z(size - 1)
    signed, mask = type_name in SIGNED, MASKS[size // 8]

    # Amounts past the width shift everything out; an arithmetic shift leaves copies of the sign.
    def shl(a: Lanes, amount: Lanes) -> Lanes:
        count = amount & low
        return np.where(count > limit, _Z(0), (a << np.minimum(count, limit)) & mask)

    def shr(a: Lanes, amount: Lanes) -> Lanes:
        count = amount & low
        return np.where(count > limit, _Z(0), (a & mask) >> np.minimum(count, limit))

    def sar(a: Lanes, amount: Lanes) -> Lanes:
        x = value(a)
        return lanes_of(x >> np.minimum(amount & low, limit).astype(x.dtype))

    return shl if left else sar if signed else shr


def _funnel_shift(mods: Modifiers) -> Operation:
    mods.type("b32")
    left, wrap = mods.choice("l", "r") == "l", mods.choice("wrap", "clamp") == "wrap"
    mods.done()
    word, thirty_two = MASKS[4], _Z(32)

    def funnel(low: Lanes, high: Lanes, amount: Lanes) -> Lanes:
        count = amount & _Z(31) if wrap else np.minimum(amount & word, thirty_two)
        both = ((high & word) << thirty_two) | (low & word)
        return (both << count) >> thirty_two if left else (both >> count) & word

    return funnel


def _field(count: Lanes) -> Lanes:
    """2^count - 1, for counts up to 64."""
    return np.where(count >= _Z(64), ~_Z(0), (_Z(1) << np.minimum(count, _Z(63))) - _Z(1))


def _extract_field(mods: Modifiers) -> Operation:
    type_name = mods.type("u32", "u64", "s32", "s64")
    mods.done()
    size, signed = int(type_name[1:]), type_name in SIGNED
    mask, top = MASKS[size // 8], _Z(size - 1)

    def extract(a: Lanes, position: Lanes, length: Lanes) -> Lanes:
        a, position, length = a & mask, position & _Z(255), length & _Z(255)
        field = np.where(position > top, _Z(0), a >> np.minimum(position, top)) & _field(length)
        if not signed:
            return field
        # Bits past the field or past the word are copies of the field's top bit, or of the word's.
        last = np.minimum(position + length - _Z(1), top)
        negative = (length > 0) & (((a >> last) & _Z(1)) == 1)
        inside = np.where(position > top, _Z(0), _Z(size) - np.minimum(position, top))
        return np.where(negative, field | ~_field(np.minimum(length, inside)), field) & mask

    return extract


def _insert_field(mods: Modifiers) -> Operation:
    size = int(mods.type(*WORDS)[1:])
    mods.done()
    mask, top = MASKS[size // 8], _Z(size - 1)

    def insert(a: Lanes, b: Lanes, position: Lanes, length: Lanes) -> Lanes:
        position, length = position & _Z(255), length & _Z(255)
        shift = np.minimum(position, top)
        field = np.where(position > top, _Z(0), (_field(length) << shift) & mask)
        return (b & mask & ~field) | ((a << shift) & field)

    return insert


def _bit_length(x: Lanes) -> Lanes:
    """The position of the highest set bit plus one; 0 for 0."""
    length = np.zeros_like(x)
    for step in (32, 16, 8, 4, 2, 1):
        high = x >> _Z(step)
        some = high != 0
        length += np.where(some, _Z(step), _Z(0))
        x = np.where(some, high, x)
    return length + (x != 0)


def _find_highest(mods: Modifiers) -> Operation:
    type_name = mods.type("u32", "u64", "s32", "s64")
    as_shift = mods.flag("shiftamt")
    mods.done()
    value, top = narrow(type_name), int(type_name[1:]) - 1

    def find(a: Lanes) -> Lanes:
        x = value(a)
        position = _bit_length(lanes_of(np.where(x < 0, ~x, x))) - _Z(1)  # wraps to all ones when there is none
        none = position > _Z(63)
        return np.where(none, MASKS[4], _Z(top) - position if as_shift else position)

    return find


def _count(mods: Modifiers) -> Operation:
    size = int(mods.type(*WORDS)[1:])
    mods.done()
    mask = MASKS[size // 8]
    if mods.opcode == "popc":
        return lambda a: np.bitwise_count(a & mask).astype(np.uint64)
    return lambda a: _Z(size) - _bit_length(a & mask)


def _reverse(mods: Modifiers) -> Operation:
    size = int(mods.type(*WORDS)[1:])
    mods.done()
    swaps = [(_Z(1 << i), _Z(sum(((1 << (1 << i)) - 1) << j for j in range(0, 64, 2 << i)))) for i in range(6)]

    def reverse(a: Lanes) -> Lanes:
        for shift, mask in swaps:
            a = ((a >> shift) & mask) | ((a & mask) << shift)
        return a >> _Z(64 - size)

    return reverse


def _bytes_chosen(mode: str) -> np.ndarray:
    """(4 selectors, 4 result bytes) → which of the 8 bytes of b:a a mode of prmt picks."""
    i, k = np.arange(4)[:, None], np.arange(4)[None]
    return {
        "f4e": i + k,
        "b4e": (i - k) % 8,
        "rc8": i + 0 * k,
        "ecl": np.maximum(k, i),
        "ecr": np.minimum(k, i),
        "rc16": (i & 1) * 2 + (k & 1),
    }[mode]


def _permute(mods: Modifiers) -> Operation:
    mode = mods.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="any")  # comes after the type
    mods.type("b32")
    mods.done()
    places = np.arange(0, 32, 8, dtype=np.uint64)[:, None]
    chosen = None if mode == "any" else _bytes_chosen(mode).astype(np.uint64)

    def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        both = ((b & MASKS[4]) << _Z(32)) | (a & MASKS[4])
        if chosen is None:
            pick = (selector >> (places >> _Z(1))) & _Z(15)  # (4, 32), a nibble per result byte
            byte = (both >> ((pick & _Z(7)) << _Z(3))) & _Z(255)
            byte = np.where(pick > _Z(7), (byte >> _Z(7)) * _Z(255), byte)  # bit 3: eight copies of the sign
        else:
            byte = (both >> (chosen[(selector & _Z(3)).astype(np.int64)].T << _Z(3))) & _Z(255)
        return np.bitwise_or.reduce(byte << places, axis=0)

    return permute


def _mask_of_field(mods: Modifiers) -> Operation:
    mods.type("b32")
    wrap = mods.choice("clamp", "wrap") == "wrap"
    mods.done()

    def bmsk(position: Lanes, length: Lanes) -> Lanes:
        if wrap:
            position, length = position & _Z(31), length & _Z(31)
        position, length = np.minimum(position & MASKS[4], _Z(32)), np.minimum(length & MASKS[4], _Z(32))
        return (_field(length) << position) & MASKS[4]

    return bmsk


BUILDERS = {
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _logic,
    "cnot": _logic,
    "lop3": _lop3,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel_shift,
    "bfe": _extract_field,
    "bfi": _insert_field,
    "bfind": _find_highest,
    "bmsk": _mask_of_field,
    "brev": _reverse,
    "clz": _count,
    "popc": _count,
    "prmt": _permute,
}
