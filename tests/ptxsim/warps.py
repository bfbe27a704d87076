"""A warp: its registers, and its lanes as groups that run together.

Lanes that took different branches are different groups. The group with the smallest program counter runs first, mostly,
so that groups meet again soon; nothing depends on it. Instructions whose lanes have to meet (`.aligned`, or those with
a member mask) wait until they have, and report lanes that can't come any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .checks import Kind, lanes_text
from .handlers import ALL_BITS, BLOCKED, FULL, LANES, bits_of, mask_of
from .ordering import LaneFences
from .program import Instruction, Operand, Register, Sink
from .races import ThreadClocks

if TYPE_CHECKING:
    from .execute import Code
    from .launch import Cta

# Reasons to look at a register before using it: bits of Warp.guard.
UNINITIALISED, HELD = 1, 2

# How often the group with the smallest program counter is taken before others get a chance.
_PATIENCE = 1000

_POISON = np.full(LANES, 0xDEADBEEF, np.uint64)


class Group:
    """Lanes at one program counter."""

    __slots__ = ("bits", "blocked_since", "count", "mask", "pc", "waiting")

    def __init__(self, pc: int, bits: int):
        self.pc = pc
        self.waiting = False  # for other lanes of the warp
        self.blocked_since = -1  # the machine's epoch when an instruction found nothing to go on with
        self.set_lanes(bits)

    def set_lanes(self, bits: int) -> None:
        self.bits = bits
        self.mask = mask_of(bits)
        self.count = bits.bit_count()


class Warp:
    def __init__(self, cta: Cta, index: int, threads: int, first_agent: int, code: Code):
        self.cta = cta
        self.machine = cta.machine
        self.index = index
        self.code = code
        self.existing = (1 << threads) - 1
        self.exited = 0
        self.groups = [Group(0, self.existing)]
        self.clocks = ThreadClocks(self.machine.clocks, first_agent, ~mask_of(self.existing))
        self.current: Instruction = code.entries[0].instruction
        self.tokens: dict[int, object] = {}  # what a blocked instruction remembers, by its index
        # Rows are never changed in place: a step puts a new array into its slot.
        self.rows: list[np.ndarray] = code.first_rows(self, _POISON)
        self.guard = bytearray(code.first_guard)
        self._initialised: dict[int, int] = {}  # slot -> lanes, for registers that not all lanes have written
        self.accessed = bytearray(len(self.rows))  # registers read or written since the last wgmma.fence
        self._holders: dict[int, list[object]] = {}
        self.copy_groups: dict[int, object] = {}  # of bulk stores, by lane
        self.thread_copies: object | None = None  # of cp.async
        self.carry = np.zeros(LANES, np.uint64)  # the condition code register
        self.fences = LaneFences()
        self.local = code.local_memory()
        self.steps = 0
        self._picks = 0  # since several groups could run

    @property
    def done(self) -> bool:
        return not self.groups

    @property
    def name(self) -> str:
        return f"CTA {self.cta.index} warp {self.index}"

    # Registers

    def read(self, operand: Operand, mask: np.ndarray = FULL) -> np.ndarray:
        """uint64[32]; bits above the register's type are zero."""
        slot = operand.slot
        if self.guard[slot]:
            self.touch((slot,), (), mask)
        self.accessed[slot] = 1
        row = self.rows[slot]
        return row ^ np.uint64(1) if isinstance(operand, Register) and operand.negated else row

    def read_scalar(self, operand: Operand, mask: np.ndarray) -> int:
        """The value of the first lane in mask: for operands that are the same in all lanes."""
        return int(self.read(operand, mask)[int(mask.argmax())])

    def write(self, operand: Operand, values: np.ndarray, mask: np.ndarray = FULL) -> None:
        """values: uint64[32], zero above the register's type. Only lanes in mask change."""
        if isinstance(operand, Sink):
            return
        slot = operand.slot
        if self.guard[slot]:
            self.touch((), (slot,), mask)
        self.accessed[slot] = 1
        self.rows[slot] = values if mask is FULL else np.where(mask, values, self.rows[slot])

    def touch(self, sources: tuple[int, ...], destinations: tuple[int, ...], mask: np.ndarray) -> None:
        """The slow path of registers whose guard isn't 0: reports what is wrong, notes what becomes initialised."""
        bits = ALL_BITS if mask is FULL else bits_of(mask)
        for slot in sources:
            guard = self.guard[slot]
            if guard & UNINITIALISED:
                self._check_initialised(slot, bits)
            if guard & HELD:
                self._report_held(slot, "reads", mask)
        for slot in destinations:
            if self.guard[slot] & HELD:
                self._report_held(slot, "writes", mask)
            if self.guard[slot] & UNINITIALISED:
                self._note_initialised(slot, bits)

    def _check_initialised(self, slot: int, bits: int = ALL_BITS) -> None:
        missing = bits & ~self._initialised.get(slot, 0) & self.existing
        if missing:
            self.report(Kind.UNINITIALISED_REGISTER, f"reads {self._register(slot)}", _lanes(missing))
            self._note_initialised(slot, missing)  # once is enough

    def _note_initialised(self, slot: int, bits: int) -> None:
        bits |= self._initialised.get(slot, 0)
        self._initialised[slot] = bits
        if not self.existing & ~bits:
            self.guard[slot] &= ~UNINITIALISED

    def hold(self, slot: int, holder: object, writes: bool, reads: bool) -> None:
        """An asynchronous operation has the register until it is released; `str(holder)` says which."""
        if self.guard[slot] & UNINITIALISED:
            if reads:
                self._check_initialised(slot)
            if writes:
                self._note_initialised(slot, ALL_BITS)
        self._holders.setdefault(slot, []).append(holder)
        self.guard[slot] |= HELD

    def release(self, slot: int, holder: object) -> None:
        holders = self._holders[slot]
        holders.remove(holder)
        if not holders:
            self.guard[slot] &= ~HELD

    def _report_held(self, slot: int, verb: str, mask: np.ndarray) -> None:
        holder = self._holders[slot][-1]
        detail = f"{verb} {self._register(slot)}, which is in flight: {holder}"
        self.report(Kind.WGMMA, detail, np.flatnonzero(mask))

    def _register(self, slot: int) -> str:
        return self.code.kernel.slots[slot].name

    # Reports

    def report(
        self,
        kind: Kind,
        detail: str,
        lanes=None,
        other: int = -1,
        instruction: Instruction | None = None,
    ) -> None:
        """lanes: indices. other: the index of an earlier instruction."""
        where = self.name
        if lanes is not None and len(lanes):
            where += f" lane{'s' if len(lanes) > 1 else ''} {lanes_text(lanes)}"
        instructions = self.code.kernel.instructions
        self.machine.reports.add(
            kind, instruction or self.current, where, detail, instructions[other] if other >= 0 else None
        )

    def conflict(self, lanes: np.ndarray):
        """A callback for Shadow, whose rows are indices into lanes."""

        def report(kind: Kind, rows: np.ndarray, detail: str, other: int) -> None:
            self.report(kind, detail, lanes[rows], other)

        return report

    # Running

    def runnable(self) -> bool:
        epoch = self.machine.epoch
        ready = any(not group.waiting and group.blocked_since != epoch for group in self.groups)
        return ready or (bool(self.groups) and all(group.waiting for group in self.groups))

    def run(self, limit: int) -> int:
        """Executes up to `limit` instructions; returns how many, 0 when all lanes wait."""
        executed = 0
        while executed < limit:
            group = self._pick()
            if group is None:
                break
            count = self._run_group(group, limit - executed)
            executed += count
            if not count and not self.groups:
                break
        self.steps += executed
        return executed

    def _pick(self) -> Group | None:
        epoch = self.machine.epoch
        ready = [group for group in self.groups if not group.waiting and group.blocked_since != epoch]
        if not ready:
            return self._pick_stranded()
        if len(ready) == 1:
            self._picks = 0
            return ready[0]
        # Lanes that wait in a loop for what the others do would keep these from running for ever.
        self._picks += 1
        if self._picks > _PATIENCE and self.machine.random.random() < 1 / 4:
            return self.machine.random.choice(ready)
        return min(ready, key=lambda group: group.pc)

    def _pick_stranded(self) -> Group | None:
        """When all groups of the warp wait for each other: the lanes that miss don't come. Reported by _meet."""
        if self.groups and all(group.waiting for group in self.groups):
            group = min(self.groups, key=lambda group: group.pc)
            group.waiting = False
            return group
        return None

    def _run_group(self, group: Group, limit: int) -> int:
        code = self.code
        steps, instructions = code.steps, code.kernel.instructions
        warp_counts, thread_counts = code.warp_counts, code.thread_counts
        group.blocked_since = -1
        meeting_points = {other.pc for other in self.groups if other is not group}
        pc, mask, count = group.pc, group.mask, group.count
        executed = 0
        while executed < limit:
            self.current = instructions[pc]
            step = steps[pc]
            if step is None:
                group.pc = pc
                if not code.entries[pc].control(self, group):
                    return executed
                warp_counts[pc] += 1
                thread_counts[pc] += count
                executed += 1
                if meeting_points or group.count != count or len(self.groups) > 1:
                    self._merge(group)
                    return executed
                pc = group.pc
                continue
            if step(self, mask) == BLOCKED:
                group.pc = pc
                group.blocked_since = self.machine.epoch
                return executed
            warp_counts[pc] += 1
            thread_counts[pc] += count
            executed += 1
            pc += 1
            if pc in meeting_points:
                group.pc = pc
                self._merge(group)
                return executed
        group.pc = pc
        return executed

    def _merge(self, group: Group) -> None:
        """Takes in the lanes that wait where the group is now, and drops a group without lanes."""
        if group.count == 0:
            self.groups.remove(group)
            return
        for other in self.groups:
            if other is not group and other.pc == group.pc and other.count:
                group.set_lanes(group.bits | other.bits)
                group.waiting = False
                other.count = 0
                self._picks = 0
        self.groups = [other for other in self.groups if other.count]

    def split(self, group: Group, bits: int, pc: int) -> Group:
        """Lanes `bits` of a group go on at pc, as a group of their own."""
        group.set_lanes(group.bits & ~bits)
        for other in self.groups:
            if other is not group and other.pc == pc:
                other.set_lanes(other.bits | bits)
                other.waiting = False
                return other
        new = Group(pc, bits)
        self.groups.append(new)
        return new

    def exit_lanes(self, group: Group, bits: int) -> None:
        self.exited |= bits
        group.set_lanes(group.bits & ~bits)
        self.machine.wake()


def _lanes(bits: int) -> np.ndarray:
    return np.flatnonzero(mask_of(bits))
