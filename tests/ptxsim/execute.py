"""Instructions -> steps: what the warps' loop calls. Control flow and the meeting of lanes are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .alu_types import UnsupportedInstruction
from .arithmetic import arithmetic_step
from .checks import Kind, lanes_text
from .handlers import BLOCKED, DONE, FULL, LANES, Handler, Step, bits_of, find_handler, mask_of
from .memory import SharedLayout
from .program import Instruction, Kernel, Register
from .warps import UNINITIALISED, Group, Warp

_ONE = np.uint64(1)


@dataclass
class Entry:
    """One instruction. A plain one only has a step; else control moves the group and says whether it did."""

    instruction: Instruction
    plain: bool
    step: Step | None = None
    control: Callable[[Warp, Group], bool] | None = None


def compile_kernel(kernel: Kernel) -> list[Entry]:
    """Raises UnsupportedInstruction, naming opcode, modifiers and place."""
    return [_compile(instruction) for instruction in kernel.instructions]


def _compile(instruction: Instruction) -> Entry:
    try:
        return _compile_entry(instruction)
    except UnsupportedInstruction as error:
        error.args = (f"{error} at {instruction.location}: {instruction.text}",)
        raise


def _compile_entry(instruction: Instruction) -> Entry:
    if instruction.opcode in ("bra", "brx"):
        control = _branch(instruction) if instruction.opcode == "bra" else _indexed_branch(instruction)
        return Entry(instruction, False, control=control)
    if instruction.opcode in ("ret", "exit"):
        return Entry(instruction, False, control=_exit(instruction))
    handler = find_handler(instruction)
    if handler is None:
        step = arithmetic_step(instruction)
    else:
        step = handler.compile(instruction)
    if handler and handler.member_mask is not None:
        return Entry(instruction, False, step, _meeting_members(instruction, step, handler))
    if "aligned" in instruction.modifiers or instruction.opcode in ("bar", "barrier"):
        return Entry(instruction, False, step, _meeting_warp(instruction, step))
    if handler and handler.may_block:
        return Entry(instruction, False, step, _blocking(instruction, step))
    return Entry(instruction, True, _predicated(instruction, step))


# Predicates


def _lanes_where(warp: Warp, predicate: Register, group: Group) -> int:
    """Bits of the group's lanes that execute."""
    slot = predicate.slot
    if warp.guard[slot]:
        warp.touch((slot,), (), group.mask)
    row = warp.rows[slot]
    if group.mask is not FULL:
        row = row * group.mask
    count = np.count_nonzero(row)
    if count == 0:
        bits = 0
    elif count == group.count:
        bits = group.bits
    else:
        bits = bits_of(row != 0)
    return group.bits & ~bits if predicate.negated else bits


def _predicated(instruction: Instruction, step: Step) -> Step:
    predicate = instruction.predicate
    if predicate is None:
        return step
    slot, negated = predicate.slot, predicate.negated

    def predicated(warp: Warp, mask: np.ndarray) -> int:
        if warp.guard[slot]:
            warp.touch((slot,), (), mask)
        chosen = (warp.rows[slot] == 0) if negated else (warp.rows[slot] != 0)
        if mask is not FULL:
            chosen &= mask
        count = np.count_nonzero(chosen)
        if count == 0:
            return DONE
        return step(warp, FULL if count == LANES else chosen)

    return predicated


# Control flow


def _branch(instruction: Instruction):
    (target,) = instruction.targets
    predicate = instruction.predicate

    def jump(warp: Warp, group: Group) -> bool:
        group.pc = target
        return True

    def branch(warp: Warp, group: Group) -> bool:
        taken = _lanes_where(warp, predicate, group)
        if taken == group.bits:
            group.pc = target
            return True
        group.pc += 1
        if taken:
            warp.split(group, taken, target)
        return True

    return branch if predicate else jump


def _indexed_branch(instruction: Instruction):
    (operand,) = instruction.operands
    targets = instruction.targets

    def control(warp: Warp, group: Group) -> bool:
        bits = _lanes_where(warp, instruction.predicate, group) if instruction.predicate else group.bits
        chosen = warp.read(operand, group.mask)
        by_target: dict[int, int] = {}
        for lane in np.flatnonzero(mask_of(bits)):
            index = int(chosen[lane])
            if index >= len(targets):
                warp.report(Kind.OUT_OF_BOUNDS, f"branch {index} of {len(targets)}", [lane])
                index = 0
            by_target[targets[index]] = by_target.get(targets[index], 0) | 1 << int(lane)
        group.pc += 1
        for target, lanes in by_target.items():
            warp.split(group, lanes, target)
        return True

    return control


def _exit(instruction: Instruction):
    predicate = instruction.predicate

    def control(warp: Warp, group: Group) -> bool:
        bits = _lanes_where(warp, predicate, group) if predicate else group.bits
        group.pc += 1
        if bits:
            warp.exit_lanes(group, bits)
        return True

    return control


# Instructions at which lanes meet


def _executing(warp: Warp, group: Group, predicate: Register | None) -> bool:
    """Sends on the lanes whose predicate is false. False when none is left here."""
    if predicate is None:
        return True
    bits = _lanes_where(warp, predicate, group)
    if bits == 0:
        group.pc += 1
        return False
    if bits != group.bits:
        warp.split(group, group.bits & ~bits, group.pc + 1)
    return True


def _stranded(warp: Warp, group: Group, missing: int) -> bool:
    """Whether the missing lanes can't come: they have exited, or wait somewhere for this group."""
    return not missing & ~warp.exited or all(other is group or other.waiting for other in warp.groups)


def _missing_text(warp: Warp, missing: int) -> str:
    parts = []
    if missing & warp.exited:
        parts.append(f"lanes {lanes_text(np.flatnonzero(mask_of(missing & warp.exited)))} have exited")
    for other in warp.groups:
        if other.bits & missing:
            place = warp.code.entries[other.pc].instruction
            lanes = lanes_text(np.flatnonzero(mask_of(other.bits & missing)))
            parts.append(f"lanes {lanes} are at {place.location}: {place.text}")
    return "; ".join(parts)


def _finish(warp: Warp, group: Group, step: Step) -> bool:
    if step(warp, group.mask) == BLOCKED:
        group.blocked_since = warp.machine.epoch
        return False
    group.pc += 1
    return True


def _blocking(instruction: Instruction, step: Step):
    def control(warp: Warp, group: Group) -> bool:
        return not _executing(warp, group, instruction.predicate) or _finish(warp, group, step)

    return control


def _meeting_warp(instruction: Instruction, step: Step):
    """All lanes of the warp execute the instruction together."""

    def control(warp: Warp, group: Group) -> bool:
        if not _executing(warp, group, instruction.predicate):
            return True
        missing = warp.existing & ~group.bits
        if missing:
            if not _stranded(warp, group, missing):
                group.waiting = True
                return False
            warp.report(Kind.DIVERGENCE, _missing_text(warp, missing), np.flatnonzero(group.mask))
        return _finish(warp, group, step)

    return control


def _is_warp_barrier(instruction: Instruction) -> bool:
    return instruction.opcode == "bar" and instruction.modifiers[0] == "warp"


def _at_other_barriers(warp: Warp, group: Group, members: int, missing: int) -> int:
    """Lanes may meet at different bar.warp.sync of one mask. If all that miss wait at such: sends them on, and returns
    them."""
    found: list[tuple[Group, int]] = []
    for other in warp.groups:
        instruction = warp.code.entries[other.pc].instruction
        if other is not group and other.waiting and _is_warp_barrier(instruction):
            same = warp.read(instruction.operands[0], other.mask) & np.uint64(0xFFFFFFFF) == members
            found.append((other, bits_of(same & other.mask) & missing))
    lanes = sum(bits for _, bits in found)
    if missing & ~lanes:
        return 0
    for other, bits in found:
        if bits:
            warp.split(other, bits, other.pc + 1)
    return lanes


def _meeting_members(instruction: Instruction, step: Step, handler: Handler):
    """The lanes that the member mask names execute the instruction together; each set of lanes for itself."""
    operand = instruction.operands[handler.member_mask]
    is_barrier = _is_warp_barrier(instruction)

    def control(warp: Warp, group: Group) -> bool:
        if not _executing(warp, group, instruction.predicate):
            return True
        masks = warp.read(operand, group.mask)
        first = int(masks[int(group.mask.argmax())])
        if np.count_nonzero(masks[group.mask] != first) == 0:
            sets = {first & 0xFFFFFFFF: group.bits}
        else:
            sets = {}
            for lane in np.flatnonzero(group.mask):
                member = int(masks[lane]) & 0xFFFFFFFF
                sets[member] = sets.get(member, 0) | 1 << int(lane)
        passed = 0
        for members, lanes in sets.items():
            if lanes & ~members:
                strays = np.flatnonzero(mask_of(lanes & ~members))
                warp.report(Kind.MEMBER_MASK, f"the lane isn't in its member mask {members:#x}", strays)
            missing = members & warp.existing & ~lanes
            together = lanes
            if missing and is_barrier:
                together |= _at_other_barriers(warp, group, members, missing)
            if missing & ~together:
                if not _stranded(warp, group, missing):
                    continue
                detail = f"of the member mask {members:#x}, {_missing_text(warp, missing & ~group.bits)}"
                if missing & group.bits:
                    detail += f"; lanes {lanes_text(np.flatnonzero(mask_of(missing & group.bits)))} have another mask"
                warp.report(Kind.MEMBER_MASK, detail, np.flatnonzero(mask_of(lanes)))
            step(warp, mask_of(together))
            passed |= lanes
        if passed == group.bits:
            group.pc += 1
            return True
        group.waiting = True
        if passed:
            warp.split(group, passed, group.pc + 1)
        return bool(passed)

    return control


class Code:
    """A kernel as one launch runs it: steps, the constants' rows, and counters per instruction."""

    def __init__(self, kernel: Kernel, entries: list[Entry], layout: SharedLayout, symbols: dict[str, int]):
        self.kernel = kernel
        self.entries = entries
        self.steps = [entry.step if entry.plain else None for entry in entries]
        self.warp_counts = [0] * len(entries)
        self.thread_counts = [0] * len(entries)
        self.first_guard = bytes(UNINITIALISED if slot.kind == "register" else 0 for slot in kernel.slots)
        self._rows: list[np.ndarray | None] = []
        self._specials: list[tuple[int, str]] = []
        for index, slot in enumerate(kernel.slots):
            row = None
            if slot.kind == "immediate":
                row = np.full(LANES, slot.value, np.uint64)
            elif slot.kind == "symbol":
                row = np.full(LANES, self._address(slot, layout, symbols), np.uint64)
            elif slot.kind == "special":
                self._specials.append((index, slot.name))
            self._rows.append(row)

    def _address(self, slot, layout: SharedLayout, symbols: dict[str, int]) -> int:
        if slot.type == "shared":
            return layout.addresses[slot.name]
        if slot.type == "dynamic":
            return layout.dynamic
        if slot.type in ("local", "param"):
            return slot.value
        return symbols[slot.name]

    def first_rows(self, warp: Warp, poison: np.ndarray) -> list[np.ndarray]:
        rows = [poison if row is None else row for row in self._rows]
        for index, name in self._specials:
            rows[index] = special_register(name, warp)
        return rows

    def local_memory(self) -> np.ndarray | None:
        """uint8[32, bytes] and whether each byte is initialised."""
        if not self.kernel.local_bytes:
            return None
        return np.zeros((2, LANES, self.kernel.local_bytes), np.uint8)


def special_register(name: str, warp: Warp) -> np.ndarray:
    """uint64[32]. Clocks are read by their own step; here they are 0."""
    cta, lane = warp.cta, np.arange(LANES, dtype=np.uint64)
    if name == "tid.x":
        return lane + np.uint64(LANES * warp.index)
    if name == "laneid":
        return lane
    if name.startswith("lanemask_"):
        below = (_ONE << lane) - _ONE
        bit = _ONE << lane
        return {
            "eq": bit,
            "lt": below,
            "le": below | bit,
            "gt": ~(below | bit) & np.uint64(0xFFFFFFFF),
            "ge": ~below & np.uint64(0xFFFFFFFF),
        }[name[-2:]]
    values = {
        "ntid.x": cta.threads,
        "ctaid.x": cta.index,
        "nctaid.x": cta.grid,
        "warpid": warp.index,
        "nwarpid": len(cta.warps) or -(-cta.threads // LANES),
        "smid": cta.slot % cta.machine.multiprocessors,
        "nsmid": cta.machine.multiprocessors,
        "dynamic_smem_size": cta.dynamic_bytes,
        "total_smem_size": cta.layout.used_bytes,
        "clusterid.x": cta.index,
        "nclusterid.x": cta.grid,
    }
    one = name.startswith(("ntid.", "nctaid.", "nclusterid.", "cluster_nctaid."))
    return np.full(LANES, values.get(name, 1 if one else 0), np.uint64)
