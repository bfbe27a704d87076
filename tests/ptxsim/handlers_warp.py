"""Instructions by which the lanes of a warp exchange values, and mov."""

from __future__ import annotations

import numpy as np

from .alu_types import UnsupportedInstruction
from .arithmetic import generated_step
from .checks import Kind
from .handlers import DONE, FULL, LANES, bits_of, handles
from .program import TYPE_BYTES, Instruction, Operand, Pair, Register, Sink, Special, Vector

_LANE = np.arange(LANES)
_CLOCKS = {"clock", "clock_hi", "clock64", "globaltimer"}


def _full(value: int) -> np.ndarray:
    return np.full(LANES, value, np.uint64)


def _with_predicate(destination: Operand) -> tuple[Operand, Operand]:
    """Of `d|p`; the predicate of a plain `d` goes nowhere."""
    return (destination.first, destination.second) if isinstance(destination, Pair) else (destination, Sink())


@handles("mov")
def compile_mov(instruction: Instruction):
    destination, source = instruction.operands
    bits = 8 * TYPE_BYTES[instruction.modifiers[-1]]
    if isinstance(source, Vector):
        return _pack(destination, source, bits // len(source.items))
    if isinstance(destination, Vector):
        return _unpack(destination, source, bits // len(destination.items))
    if isinstance(source, Special) and source.name in _CLOCKS:

        def read_clock(warp, mask):
            # Time passes, and differs between runs with different seeds.
            warp.write(destination, _full(warp.machine.steps & (1 << bits) - 1), mask)
            return DONE

        return read_clock
    if isinstance(source, Register) and source.negated:
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers, "of a negated predicate")
    return generated_step(lambda row: row, destination.slot, (source.slot,))


def _pack(destination, source: Vector, bits: int):
    part = np.uint64((1 << bits) - 1)

    def step(warp, mask):
        row = np.zeros(LANES, np.uint64)
        for i, item in enumerate(source.items):
            row |= (warp.read(item, mask) & part) << np.uint64(bits * i)
        warp.write(destination, row, mask)
        return DONE

    return step


def _unpack(destination: Vector, source, bits: int):
    part = np.uint64((1 << bits) - 1)

    def step(warp, mask):
        row = warp.read(source, mask)
        for i, item in enumerate(destination.items):
            if not isinstance(item, Sink):
                warp.write(item, (row >> np.uint64(bits * i)) & part, mask)
        return DONE

    return step


@handles("bar.warp", member_mask=0)
def compile_bar_warp(instruction: Instruction):
    def step(warp, mask):
        warp.clocks.synchronise(mask)
        return DONE

    return step


@handles("shfl", member_mask=4)
def compile_shfl(instruction: Instruction):
    destination, value, b, c = instruction.operands[:4]
    mode = instruction.modifiers[1]
    destination, predicate = _with_predicate(destination)

    def step(warp, mask):
        values = warp.read(value, mask)
        distance = (warp.read(b, mask) & np.uint64(31)).astype(np.int64)
        clamp = warp.read(c, mask).astype(np.int64)
        segment, clamp = (clamp >> 8) & 31, clamp & 31
        low = _LANE & segment
        high = low | (clamp & ~segment)
        if mode == "up":
            source = _LANE - distance
            inside = source >= high
        elif mode == "down":
            source = _LANE + distance
            inside = source <= high
        elif mode == "bfly":
            source = _LANE ^ distance
            inside = source <= high
        else:
            source = low | (distance & ~segment)
            inside = source <= high
        source = np.where(inside, source, _LANE)
        if mask is not FULL:
            absent = mask & ~mask[source]
            if absent.any():
                lane = int(source[absent][0])
                detail = f"gets the value of lane {lane}, which doesn't take part"
                warp.report(Kind.MEMBER_MASK, detail, np.flatnonzero(absent))
        warp.write(destination, values[source], mask)
        warp.write(predicate, inside.astype(np.uint64), mask)
        return DONE

    return step


@handles("vote", member_mask=2)
def compile_vote(instruction: Instruction):
    destination, predicate = instruction.operands[:2]
    mode = instruction.modifiers[1]
    if mode not in ("all", "any", "uni", "ballot"):
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers)

    def step(warp, mask):
        yes = warp.read(predicate, mask) != 0
        if mode == "ballot":
            result = bits_of(yes & mask)
        elif mode == "any":
            result = bool(yes[mask].any())
        elif mode == "all":
            result = bool(yes[mask].all())
        else:
            result = len(set(yes[mask].tolist())) == 1
        warp.write(destination, _full(int(result)), mask)
        return DONE

    return step


@handles("match", member_mask=2)
def compile_match(instruction: Instruction):
    destination, value = instruction.operands[:2]
    every = instruction.modifiers[0] == "all"
    destination, predicate = _with_predicate(destination)

    def step(warp, mask):
        values = warp.read(value, mask)
        if every:
            same = len(set(values[mask].tolist())) == 1
            warp.write(destination, _full(bits_of(mask) if same else 0), mask)
            warp.write(predicate, _full(int(same)), mask)
            return DONE
        result = np.zeros(LANES, np.uint64)
        for one in np.unique(values[mask]):
            equal = mask & (values == one)
            result[equal] = bits_of(equal)
        warp.write(destination, result, mask)
        return DONE

    return step


@handles("redux", member_mask=2)
def compile_redux(instruction: Instruction):
    destination, value = instruction.operands[:2]
    name, type_name = instruction.modifiers[1], instruction.modifiers[-1]
    reduce = {
        "add": lambda x: np.add.reduce(x, dtype=x.dtype),
        "min": np.min,
        "max": np.max,
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }.get(name)
    if reduce is None or type_name not in ("u32", "s32", "b32"):
        raise UnsupportedInstruction(instruction.opcode, instruction.modifiers)
    dtype = np.int32 if type_name == "s32" else np.uint32

    def step(warp, mask):
        values = warp.read(value, mask)[mask].astype(np.uint32).view(dtype)
        warp.write(destination, _full(int(reduce(values)) & 0xFFFFFFFF), mask)
        return DONE

    return step


@handles("elect", member_mask=1)
def compile_elect(instruction: Instruction):
    destination = instruction.operands[0]

    def step(warp, mask):
        # Any lane may be elected; the lowest one is what the hardware takes.
        leader = int(mask.argmax())
        warp.write(destination.first, _full(leader), mask)
        warp.write(destination.second, (leader == _LANE).astype(np.uint64), mask)
        return DONE

    return step


@handles("activemask")
def compile_activemask(instruction: Instruction):
    (destination,) = instruction.operands

    def step(warp, mask):
        warp.write(destination, _full(bits_of(mask)), mask)
        return DONE

    return step
