"""Fences of the async proxy, the pool of registers, and instructions that are only hints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .alu_types import UnsupportedInstruction
from .checks import Kind
from .handlers import BLOCKED, DONE, LANES, handles
from .handlers_mbarrier import fence_barriers
from .program import Immediate, Instruction
from .warpgroups import WARPS, warpgroup_of

_REGISTERS_OF_A_MULTIPROCESSOR = 65536
_LEAST, _MOST, _UNIT = 24, 256, 8  # registers a thread that setmaxnreg can ask for


@handles("fence.proxy", "fence.mbarrier_init")
def compile_fence(instruction: Instruction):
    whole = instruction.modifiers[0] == "proxy"
    if whole and instruction.modifiers[1] not in ("async", "async::generic"):
        raise UnsupportedInstruction("fence", instruction.modifiers, "only the async proxy is known")

    def step(warp, mask):
        if whole:
            warp.clocks.fence_proxy(mask)
        fence_barriers(warp, mask)
        return DONE

    return step


@handles("createpolicy")
def compile_createpolicy(instruction: Instruction):
    destination = instruction.operands[0]

    def step(warp, mask):
        warp.write(destination, np.full(LANES, 1 << 60, np.uint64), mask)  # opaque
        return DONE

    return step


@handles("griddepcontrol")
def compile_griddepcontrol(instruction: Instruction):
    waits = "wait" in instruction.modifiers  # launch_dependents says only when the next launch may start

    def step(warp, mask):
        if waits and warp.machine.earlier:
            warp.machine.earlier.wait(warp, mask)
        return DONE

    return step


# ------------------------------------------------------------------------------------------------------- setmaxnreg


@dataclass
class RegisterPool:
    """The registers of a CTA, in threads of a warpgroup: what one gives up another may take."""

    each: dict[int, int]  # registers a thread, by warpgroup
    changes: dict[int, int]  # that were carried out, by warpgroup
    free: int = 0

    def __str__(self) -> str:
        return f"{self.free} registers a thread are free, the warpgroups have {list(self.each.values())}"


def _registers_at_launch(warp, threads: int) -> int:
    """What the launch bounds leave a thread, but no more than the kernel ever asks for: that is what ptxas takes."""
    asked = [i.operands[0].value for i in warp.code.kernel.instructions if i.opcode == "setmaxnreg"]
    return min(_REGISTERS_OF_A_MULTIPROCESSOR // threads // _UNIT * _UNIT, max(asked))


def _pool(warp) -> RegisterPool:
    cta = warp.cta
    if cta.register_pool is None:
        bound = warp.code.kernel.max_threads
        if bound is None:
            warp.report(Kind.REGISTER_POOL, "a kernel without launch bounds doesn't know how many registers it has")
        each = _registers_at_launch(warp, bound or cta.threads)
        groups = range(-(-len(cta.warps) // WARPS))
        cta.register_pool = RegisterPool(dict.fromkeys(groups, each), dict.fromkeys(groups, 0))
    return cta.register_pool


@handles("setmaxnreg")
def compile_setmaxnreg(instruction: Instruction):
    (count,) = instruction.operands
    if not isinstance(count, Immediate):
        raise UnsupportedInstruction("setmaxnreg", instruction.modifiers, "a count that is no immediate")
    wanted, lowers = count.value, "dec" in instruction.modifiers
    allowed = _LEAST <= wanted <= _MOST and wanted % _UNIT == 0

    def step(warp, mask):
        group = warpgroup_of(warp)
        if group is None:
            return DONE
        member, index = warp.index % WARPS, warp.index // WARPS
        changes = group.register_changes
        if instruction.index not in warp.tokens:
            warp.tokens[instruction.index] = len(changes[member])
            if not any(changes):
                warp.cta.at_exit.append(lambda: _check_at_exit(group, warp))
            changes[member].append(instruction)
            if not allowed:
                detail = f"{wanted} registers: {_LEAST} to {_MOST} in steps of {_UNIT} are allowed"
                warp.report(Kind.REGISTER_POOL, detail)
        position = warp.tokens[instruction.index]
        if not _carried_out(warp, group, position, index, wanted, lowers):
            return BLOCKED
        del warp.tokens[instruction.index]
        return DONE

    return step


def _carried_out(warp, group, position: int, index: int, wanted: int, lowers: bool) -> bool:
    """A warpgroup's change happens once, when the last of its warps is there and the pool has enough. Only who asks for
    more has to wait for it."""
    pool = _pool(warp)
    if pool.changes[index] > position:
        return True
    if any(len(changes) <= position for changes in group.register_changes):
        return lowers
    change = wanted - pool.each[index]
    if (change > 0) == lowers and change:
        verb = "lowers" if lowers else "raises"
        warp.report(Kind.REGISTER_POOL, f"{verb} {pool.each[index]} registers to {wanted}")
    elif change > pool.free:
        return False
    pool.free -= change
    pool.each[index] = wanted
    pool.changes[index] = position + 1
    warp.machine.wake()
    return True


def _check_at_exit(group, warp) -> None:
    most = max(group.register_changes, key=len)
    for position, instruction in enumerate(most):
        others = [
            i
            for i, changes in enumerate(group.register_changes)
            if len(changes) <= position or changes[position] is not instruction
        ]
        if others:
            detail = f"warps {', '.join(map(str, others))} of the warpgroup don't execute it"
            warp.report(Kind.REGISTER_POOL, detail, instruction=instruction)
            return
