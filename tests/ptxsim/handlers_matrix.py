"""ldmatrix, stmatrix and mma.sync: what a warp does together on its registers."""

from __future__ import annotations

import numpy as np

from . import fragments, wgmma
from .alu_round import decode
from .alu_types import Modifiers
from .handlers import DONE, handles
from .handlers_mbarrier import shared_addresses
from .program import Instruction, Vector

_ROW_BYTES = 16


def _items(operand) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _matrix_modifiers(instruction: Instruction) -> tuple[int, bool]:
    """(matrices, whether they are transposed)"""
    mods = Modifiers(instruction.opcode, instruction.modifiers)
    for part in ("sync", "aligned", "m8n8"):
        mods.choice(part)
    count = int(mods.choice("x1", "x2", "x4")[1:])
    transposed = mods.flag("trans")
    mods.choice("shared", "shared::cta", default="generic")
    mods.type("b16")
    mods.done()
    return count, transposed


def _row_lanes(warp, operand, mask: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lanes 0 … 8·count - 1 that are there, and the addresses of the rows that they name."""
    lanes = np.flatnonzero(mask[: 8 * count])
    named = np.zeros(32, bool)
    named[lanes] = True
    return lanes, shared_addresses(warp, operand, named)[lanes].view(np.uint64)


@handles("ldmatrix")
def compile_ldmatrix(instruction: Instruction):
    count, transposed = _matrix_modifiers(instruction)
    destination, address = instruction.operands
    items = _items(destination)

    def step(warp, mask):
        lanes, rows = _row_lanes(warp, address, mask, count)
        shared = warp.cta.shared
        matrices = np.zeros((8 * count, _ROW_BYTES // 8), np.uint64)
        if len(lanes):
            warp.machine.counters.memory(warp, shared, rows, _ROW_BYTES, False)
            matrices[lanes] = shared.load(warp, lanes, rows, 8, 2, False)
        registers = fragments.matrices_to_registers(matrices.view(np.uint16).reshape(count, 8, 8), transposed)
        for item, row in zip(items, registers, strict=True):
            warp.write(item, row, mask)
        return DONE

    return step


@handles("stmatrix")
def compile_stmatrix(instruction: Instruction):
    count, transposed = _matrix_modifiers(instruction)
    address, source = instruction.operands
    items = _items(source)

    def step(warp, mask):
        lanes, rows = _row_lanes(warp, address, mask, count)
        registers = np.stack([warp.read(item, mask) for item in items])
        matrices = fragments.registers_to_matrices(registers, transposed).reshape(8 * count, 8)
        if len(lanes):
            warp.machine.counters.memory(warp, warp.cta.shared, rows, _ROW_BYTES, True)
            warp.cta.shared.store(warp, lanes, rows, matrices.view(np.uint64)[lanes], 8, False)
        return DONE

    return step


@handles("mma")
def compile_mma(instruction: Instruction):
    mods = Modifiers("mma", instruction.modifiers)
    for part in ("sync", "aligned", "m16n8k16", "row", "col"):
        mods.choice(part)
    mods.type("f32")
    element = mods.type("bf16", "f16")
    mods.type(element)
    mods.type("f32")
    mods.done()
    destination, a, b, c = (_items(operand) for operand in instruction.operands)
    read = decode(element)
    lowest = -126 if element == "bf16" else -14

    def operand(warp, mask, items, positions, shape):
        values = np.zeros(shape)
        halves = fragments.halves(np.stack([warp.read(item, mask) for item in items]))
        values[positions] = read(halves.astype(np.uint64).reshape(-1)).reshape(halves.shape)
        return values

    def step(warp, mask):
        left = operand(warp, mask, a, fragments.operand_a(), (16, 16))
        right = operand(warp, mask, b, fragments.operand_b(), (16, 8))
        places = fragments.accumulator(8)
        sums = np.zeros((16, 8))
        sums[places] = np.stack([decode("f32")(warp.read(item, mask)) for item in c])
        result = wgmma.multiply(left, right.T, sums, lowest)[places]
        for item, row in zip(destination, result, strict=True):
            warp.write(item, np.ascontiguousarray(row).view(np.uint32).astype(np.uint64), mask)
        return DONE

    return step
