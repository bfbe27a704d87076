"""Arithmetic, logic, conversions and comparisons, each as a pure function on the 32 lanes of its registers."""

import functools

from . import alu_bits, alu_compare, alu_convert, alu_float, alu_integer
from .alu_types import FLOATS, Modifiers, Operation, UnsupportedInstruction

__all__ = ["OPCODES", "UnsupportedInstruction", "carry_use", "compile_op"]

_FLOAT_TYPES = {*FLOATS, "f16x2", "bf16x2"}
_ANY_TYPE = alu_bits.BUILDERS | alu_compare.BUILDERS | {"cvt": alu_convert.build}
OPCODES = frozenset(_ANY_TYPE) | frozenset(alu_integer.BUILDERS) | frozenset(alu_float.BUILDERS) | {"setp"}


def carry_use(opcode: str, modifiers: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether an instruction reads the condition code register (as its last source), and whether it writes it (as its
    second result)."""
    return opcode in ("addc", "subc", "madc"), "cc" in modifiers


@functools.cache
def compile_op(opcode: str, modifiers: tuple[str, ...], destinations: int = 1) -> Operation:
    """The function of an instruction: uint64[32] per source, in the order of its operands, to uint64[32].

    Sources are zero above their type's width (but those of cvt, which cuts them), and so are results. Predicates are 0
    or 1. setp p|q (destinations=2) gives both, p first. carry_use says which have the condition code register as well.

    Raises UnsupportedInstruction for an opcode, a type or a modifier that is not known.
    """
    mods = Modifiers(opcode, tuple(modifiers))
    if opcode == "setp":
        return alu_compare.build_setp(mods, destinations)
    build = _ANY_TYPE.get(opcode)
    if build is None:
        is_float = bool(modifiers) and modifiers[-1] in _FLOAT_TYPES
        build = (alu_float.BUILDERS if is_float else alu_integer.BUILDERS).get(opcode)
    if build is None:
        raise UnsupportedInstruction(opcode, tuple(modifiers))
    return build(mods)
