"""Who executes which opcode.

A handler is compiled once per instruction: it decodes operands and modifiers and returns a *step*,

    step(warp, mask) -> DONE | BLOCKED        mask: bool[32], the lanes that execute; `mask is FULL` when all do

which reads and writes through warp.read and warp.write. A blocked step runs again later and must have changed nothing
but what it keeps in warp.tokens[instruction.index]. Instructions with `.aligned`, `bar` and those registered with a
member mask meet first: the step sees the whole warp, or all lanes of one mask. Modules named handlers_* are imported
by launch.

An asynchronous operation is an agent of its own (races.Clocks.async_agent). Its step takes what the issuing lanes know
(warp.clocks.snapshot or .release), makes a memory.AsyncAccess of both, and posts its completion with warp.cta.post:
the scheduler calls it at some later moment, where Region.async_read and .async_write check and do the accesses.
races.Clocks.completion(agent) is what somebody learns who sees it complete, and warp.clocks.acquire learns it.
warp.machine.wake() lets blocked steps look again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .program import Instruction

DONE, BLOCKED = 0, 1

LANES = 32
FULL = np.ones(LANES, bool)
FULL.flags.writeable = False
ALL_BITS = 0xFFFFFFFF

Step = Callable[..., int]


@dataclass(frozen=True)
class Handler:
    compile: Callable[[Instruction], Step]
    may_block: bool = False  # lanes that don't execute go on without waiting for those that do
    member_mask: int | None = None  # the operand that says which lanes meet


handlers: dict[str, Handler] = {}


def handles(*opcodes: str, may_block: bool = False, member_mask: int | None = None):
    """Registers a compiler for opcodes. "vote.sync" wins over "vote": the longest dotted prefix counts."""

    def register(function: Callable[[Instruction], Step]):
        for opcode in opcodes:
            if opcode in handlers:
                raise ValueError(f"{opcode} has a handler already")
            handlers[opcode] = Handler(function, may_block, member_mask)
        return function

    return register


def find_handler(instruction: Instruction) -> Handler | None:
    parts = (instruction.opcode, *instruction.modifiers)
    for length in range(len(parts), 0, -1):
        handler = handlers.get(".".join(parts[:length]))
        if handler:
            return handler
    return None


def bits_of(mask: np.ndarray) -> int:
    """bool[32] -> an int with bit i for lane i."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def mask_of(bits: int) -> np.ndarray:
    """The inverse of bits_of; FULL itself for all lanes."""
    if bits == ALL_BITS:
        return FULL
    return np.unpackbits(np.array([bits], np.uint32).view(np.uint8), bitorder="little").view(bool)
