"""Steps of pure functions over rows: what alu knows, between registers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import alu
from .alu_types import UnsupportedInstruction
from .handlers import DONE, FULL, Step
from .program import Instruction, Pair, Register, Vector

if TYPE_CHECKING:
    from .warps import Warp


def arithmetic_step(instruction: Instruction) -> Step:
    """A step from a pure function over rows, which alu has."""
    destination, *sources = instruction.operands
    destinations = _destinations(destination)
    function = alu.compile_op(instruction.opcode, instruction.modifiers, len(destinations))
    if any(not hasattr(source, "slot") for source in sources):
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers, "operands that are no values")
    carries = alu.carry_use(instruction.opcode, instruction.modifiers)
    plain = isinstance(destination, Register) and not any(carries)
    if plain and not any(isinstance(source, Register) and source.negated for source in sources):
        return generated_step(function, destination.slot, tuple(source.slot for source in sources))
    return _general_step(function, destinations, sources, *carries)


def _destinations(operand) -> tuple:
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand.items if isinstance(operand, Vector) else (operand,)


def _general_step(function, destinations, sources, reads_carry: bool, writes_carry: bool) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> int:
        values = [warp.read(source, mask) for source in sources]
        if reads_carry:
            values.append(warp.carry)
        result = function(*values)
        results = result if isinstance(result, tuple) else (result,)
        for operand, value in zip(destinations, results, strict=False):
            warp.write(operand, value, mask)
        if writes_carry:
            warp.carry = np.where(mask, results[-1], warp.carry)
        return DONE

    return step


_MAKER = """
def make(function, sources, destinations, {slots}):
    def step(warp, mask):
        rows = warp.rows
        guard = warp.guard
        if {guards}:
            warp.touch(sources, destinations, mask)
        accessed = warp.accessed
        {marks}
        value = function({arguments})
        rows[{destination}] = value if mask is FULL else where(mask, value, rows[{destination}])
        return 0
    return step
"""


def generated_step(function, destination: int, sources: tuple[int, ...]) -> Step:
    """Most of the interpreter's time is spent here, so the loop over operands is unrolled into source text."""
    slots = list(dict.fromkeys((destination, *sources)))
    maker = _step_maker(tuple(slots.index(source) for source in sources))
    return maker(function, sources, (destination,), *slots)


@functools.cache
def _step_maker(sources: tuple[int, ...]) -> Callable[..., Step]:
    """For operands that are these of the distinct slots, of which the first is the destination's: compiling text is
    slow, and a kernel has thousands of instructions of a few such forms."""
    slots = [f"slot{number}" for number in range(max(sources, default=0) + 1)]
    text = _MAKER.format(
        slots=", ".join(slots),
        guards=" or ".join(f"guard[{slot}]" for slot in slots),
        marks="; ".join(f"accessed[{slot}] = 1" for slot in slots),
        arguments=", ".join(f"rows[{slots[source]}]" for source in sources),
        destination=slots[0],
    )
    names = {"FULL": FULL, "where": np.where}
    exec(text, names)
    return names["make"]
