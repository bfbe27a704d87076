"""Types of PTX, and how the 32 lanes of a register (uint64[32], zero-extended) become numbers of a type and back."""

from collections.abc import Callable

import numpy as np

Lanes = np.ndarray  # uint64[32], a register of a warp; a predicate is 0 or 1
Operation = Callable[..., "Lanes | tuple[Lanes, ...]"]

UNSIGNED = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
SIGNED = {"s8": 1, "s16": 2, "s32": 4, "s64": 8}
BITS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}
FLOATS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16"}  # two halves in 32 bits
INTEGERS = UNSIGNED | SIGNED | BITS
BYTES = INTEGERS | FLOATS | dict.fromkeys(PACKED, 4)
BYTES["pred"] = 1

ONE = np.uint64(1)
MASKS = {n: np.array((1 << 8 * n) - 1, np.uint64) for n in (1, 2, 4, 8)}


class UnsupportedInstruction(Exception):
    """The interpreter has no meaning for this instruction."""

    def __init__(self, opcode: str, modifiers: tuple[str, ...], why: str = "not known to the interpreter"):
        super().__init__(f"{'.'.join((opcode, *modifiers))}: {why}")
        self.opcode, self.modifiers = opcode, modifiers


class Modifiers:
    """The dotted parts after an opcode, taken one by one: what nobody takes is an UnsupportedInstruction."""

    def __init__(self, opcode: str, parts: tuple[str, ...]):
        self.opcode, self.parts, self._left = opcode, parts, list(parts)

    def error(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(self.opcode, self.parts, why)

    def flag(self, name: str) -> bool:
        """Whether the modifier is there."""
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str:
        """The one of these modifiers that is there, else the default."""
        for part in self._left:
            if part in names:
                self._left.remove(part)
                return part
        if default is None:
            raise self.error(f"needs one of {', '.join(names)}")
        return default

    def type(self, *allowed: str) -> str:
        """The last part that is left: the type."""
        if not self._left or self._left[-1] not in allowed:
            raise self.error(f"a type of {', '.join(allowed)} should come last")
        return self._left.pop()

    def left(self) -> bool:
        """Whether there are modifiers that nobody took."""
        return bool(self._left)

    def done(self) -> None:
        if self._left:
            raise self.error(f"modifier {self._left[0]} is not known to the interpreter")


def narrow(type_name: str) -> Callable[[Lanes], np.ndarray]:
    """Lanes → an integer array of exactly the type's width and sign."""
    size = INTEGERS[type_name]
    unsigned, signed = np.dtype(f"u{size}"), np.dtype(f"i{size}")
    if type_name in SIGNED:
        return lambda lanes: lanes.astype(unsigned).view(signed)
    return lambda lanes: lanes.astype(unsigned)


def wide(type_name: str) -> Callable[[Lanes], np.ndarray]:
    """Lanes → int64 (signed types) or uint64 of the type's value."""
    to_type = narrow(type_name)
    target = np.int64 if type_name in SIGNED else np.uint64
    return lambda lanes: to_type(lanes).astype(target)


def in_order(type_name: str) -> Callable[[Lanes], np.ndarray]:
    """Lanes → integers that compare as the type's values do. Unsigned lanes already are."""
    return narrow(type_name) if type_name in SIGNED else lambda lanes: lanes


def lanes_of(values: np.ndarray) -> Lanes:
    """Integers of any width → lanes, zero-extended."""
    return values.view(f"u{values.dtype.itemsize}").astype(np.uint64)


def by_halves(operation: Operation) -> Operation:
    """An operation on 16-bit lanes applied to both halves of 32-bit lanes."""
    low, shift = MASKS[2], np.uint64(16)

    def halves(*sources: Lanes) -> Lanes:
        both = operation(*(np.concatenate((s & low, (s >> shift) & low)) for s in sources))
        return both[:32] | (both[32:] << shift)

    return halves
