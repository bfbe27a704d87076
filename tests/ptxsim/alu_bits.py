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
    mask, limit = MASKS[size // 8], _Z(size - 1)

    # Amounts past the width shift everything out, in PTX as in numpy; an arithmetic shift leaves copies of the sign.
    def sar(a: Lanes, amount: Lanes) -> Lanes:
        x = value(a)
        return lanes_of(x >> np.minimum(amount, limit).astype(x.dtype))

    if left:
        return lambda a, amount: (a << amount) & mask
    return sar if type_name in SIGNED else lambda a, amount: a >> amount


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
    """2^count - 1 modulo 2^64."""
    return (_Z(1) << count) - _Z(1)


def _extract_field(mods: Modifiers) -> Operation:
    type_name = mods.type("u32", "u64", "s32", "s64")
    mods.done()
    size, signed = int(type_name[1:]), type_name in SIGNED
    mask, top = MASKS[size // 8], _Z(size - 1)

    def extract(a: Lanes, position: Lanes, length: Lanes) -> Lanes:
        position, length = position & _Z(255), length & _Z(255)
        field = (a >> position) & _field(length)
        if not signed:
            return field
        # Bits past the field or past the word are copies of the field's top bit, or of the word's.
        last = np.minimum(position + length - _Z(1), top)
        negative = (length > 0) & (((a >> last) & _Z(1)) == 1)
        inside = np.where(position > top, _Z(0), _Z(size) - np.minimum(position, top))
        return np.where(negative, field | ~_field(np.minimum(length, inside)), field) & mask

    return extract


def _insert_field(mods: Modifiers) -> Operation:
    mask = MASKS[int(mods.type(*WORDS)[1:]) // 8]
    mods.done()

    def insert(a: Lanes, b: Lanes, position: Lanes, length: Lanes) -> Lanes:
        position = position & _Z(255)
        field = (_field(length & _Z(255)) << position) & mask
        return (b & ~field) | ((a << position) & field)

    return insert


def _bit_length(x: Lanes) -> Lanes:
    """The position of the highest set bit plus one; 0 for 0."""
    high = x >> _Z(32)
    # 32 bits fit into a float64, whose exponent is their length.
    length = np.frexp(np.where(high != 0, high, x).astype(np.float64))[1].astype(np.uint64)
    return np.where(high != 0, length + _Z(32), length)


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
    if mods.opcode == "popc":
        return lambda a: np.bitwise_count(a).astype(np.uint64)
    return lambda a: _Z(size) - _bit_length(a)


_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)


def _reverse(mods: Modifiers) -> Operation:
    unused = _Z(64 - int(mods.type(*WORDS)[1:]))
    mods.done()
    return lambda a: _REVERSED[a.view(np.uint8).reshape(-1, 8)[:, ::-1]].view(np.uint64)[:, 0] >> unused


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

    def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        index, signs = _permutation(mode, selector.tobytes())
        picked = ((b << _Z(32)) | a).view(np.uint8)[index]
        if signs is not None:
            picked = np.where(signs, (picked >> 7) * np.uint8(255), picked)
        return picked.view(np.uint32)[:, 0].astype(np.uint64)

    return permute


@functools.lru_cache(4096)
def _permutation(mode: str, selectors: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    """Of the 32 lanes' 8 bytes, those that make the results, (32, 4); and which become eight copies of their sign."""
    selector = np.frombuffer(selectors, np.uint64).astype(np.int64)[:, None]
    first = 8 * np.arange(len(selector))[:, None]
    if mode != "any":
        return first + _bytes_chosen(mode)[selector[:, 0] & 3], None
    nibbles = selector >> 4 * np.arange(4) & 15
    signs = nibbles > 7
    return first + (nibbles & 7), signs if signs.any() else None


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
