"""Barriers of a CTA, memory fences, and instructions that end things."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .alu_types import UnsupportedInstruction
from .checks import Kind
from .handlers import BLOCKED, DONE, LANES, handles
from .program import Immediate, Instruction, Name, Vector
from .races import Knowledge, join_all

BARRIERS = 16


class Abort(Exception):
    """The kernel ended itself: trap, or a failed assertion. The report has been made."""


@dataclass
class NamedBarrier:
    """One of a CTA's 16. Counts threads in whole warps, as the hardware does."""

    number: int
    generation: int = 0
    expected: int | None = None  # None: all threads of the CTA
    arrived: int = 0
    handed: list[Knowledge] = field(default_factory=list)
    released: Knowledge | None = None  # of the last complete generation
    votes: list[bool] = field(default_factory=list)
    result: list[bool] = field(default_factory=list)
    instruction: Instruction | None = None  # of the first arrival

    def arrive(self, warp, count: int | None, mask: np.ndarray, votes=()) -> None:
        if self.arrived == 0:
            self.expected, self.instruction = count, warp.current
        elif count != self.expected:
            warp.report(
                Kind.BARRIER,
                f"barrier {self.number} with a count of {count}, where others arrived with {self.expected}",
                other=self.instruction.index,
            )
        self.arrived += LANES
        self.handed.append(warp.clocks.release(mask))
        self.votes.extend(votes)
        self.try_complete(warp.cta)

    def try_complete(self, cta) -> None:
        """Also called when a warp exits: a barrier for all threads doesn't wait for it."""
        if self.arrived == 0:
            return
        expected = self.expected
        if expected is None:
            there = [warp for warp in cta.warps if not warp.done]
            expected = LANES * len(there)
            if self.arrived >= expected and len(there) < len(cta.warps):
                gone = ", ".join(str(warp.index) for warp in cta.warps if warp.done)
                waiting = there[0] if there else cta.warps[0]
                detail = f"barrier {self.number} is for all threads of the CTA, but warps {gone} have exited"
                waiting.report(Kind.BARRIER, detail, instruction=self.instruction)
        if self.arrived > expected:
            detail = f"barrier {self.number} got {self.arrived} threads, {expected} were expected"
            cta.warps[0].report(Kind.BARRIER, detail, instruction=self.instruction)
        if self.arrived >= expected:
            self.generation += 1
            self.released = join_all(self.handed)
            self.result, self.votes = self.votes, []
            self.arrived, self.handed = 0, []
            cta.machine.wake()

    def __str__(self) -> str:
        expected = "all" if self.expected is None else self.expected
        return f"barrier {self.number}: {self.arrived} of {expected} threads have arrived"


def _number_and_count(warp, mask, number, count) -> tuple[int, int | None]:
    which = warp.read_scalar(number, mask)
    if which >= BARRIERS:
        warp.report(Kind.BARRIER, f"barrier {which}: there are {BARRIERS}")
        which = 0
    if count is None:
        return which, None
    threads = warp.read_scalar(count, mask)
    if threads % LANES or threads == 0:
        warp.report(Kind.BARRIER, f"a count of {threads}: it must be a multiple of {LANES}, and not 0")
        threads = max(-(-threads // LANES), 1) * LANES
    existing = LANES * len(warp.cta.warps)
    if threads > existing:
        warp.report(Kind.BARRIER, f"a count of {threads}: the CTA has {existing} threads")
    return which, threads


@handles("bar", "barrier")
def compile_bar(instruction: Instruction):
    modifiers = [m for m in instruction.modifiers if m not in ("cta", "aligned")]
    operands = list(instruction.operands)
    if modifiers[0] == "sync":
        return _sync(operands[0], operands[1] if len(operands) > 1 else None)
    if modifiers[0] == "arrive":
        return _arrive(operands[0], operands[1])
    if modifiers[0] == "red" and modifiers[1] in ("popc", "and", "or"):
        destination, number, *count, predicate = operands
        return _reduce(modifiers[1], destination, number, count[0] if count else None, predicate)
    raise UnsupportedInstruction(instruction.opcode, instruction.modifiers)


def _wait(warp, mask, arrive) -> NamedBarrier | None:
    """The barrier once its generation is complete; None while it isn't. `arrive()` -> (barrier, its generation)."""
    key = warp.current.index
    token = warp.tokens.get(key)
    if token is None:
        token = warp.tokens[key] = arrive()
    barrier, generation = token
    if barrier.generation == generation:
        return None
    del warp.tokens[key]
    warp.clocks.replace(barrier.released, mask)
    return barrier


def _sync(number, count):
    def step(warp, mask):
        def arrive():
            which, threads = _number_and_count(warp, mask, number, count)
            barrier = warp.cta.barriers[which]
            generation = barrier.generation
            barrier.arrive(warp, threads, mask)
            return barrier, generation

        return BLOCKED if _wait(warp, mask, arrive) is None else DONE

    return step


def _arrive(number, count):
    def step(warp, mask):
        which, threads = _number_and_count(warp, mask, number, count)
        warp.cta.barriers[which].arrive(warp, threads, mask)
        return DONE

    return step


def _reduce(name: str, destination, number, count, predicate):
    def step(warp, mask):
        def arrive():
            which, threads = _number_and_count(warp, mask, number, count)
            votes = (warp.read(predicate, mask) != 0)[mask].tolist()
            barrier = warp.cta.barriers[which]
            generation = barrier.generation
            barrier.arrive(warp, threads, mask, votes)
            return barrier, generation

        barrier = _wait(warp, mask, arrive)
        if barrier is None:
            return BLOCKED
        result = {"popc": sum, "and": all, "or": any}[name](barrier.result)
        warp.write(destination, np.full(LANES, int(result), np.uint64), mask)
        return DONE

    return step


@handles("membar", "fence.sc", "fence.acq_rel", "fence.acquire", "fence.release")
def compile_fence(instruction: Instruction):
    whole_gpu = "cta" not in instruction.modifiers

    def step(warp, mask):
        warp.machine.ordering.fence(warp, mask, whole_gpu)
        return DONE

    return step


@handles("nanosleep", "pmevent")
def compile_nothing(instruction: Instruction):
    return lambda warp, mask: DONE


@handles("trap", "brkpt")
def compile_trap(instruction: Instruction):
    def step(warp, mask):
        warp.report(Kind.TRAP, "the kernel stops itself", np.flatnonzero(mask))
        raise Abort

    return step


@handles("call")
def compile_call(instruction: Instruction):
    name = next(operand.text for operand in instruction.operands if isinstance(operand, Name))
    vectors = [operand for operand in instruction.operands if isinstance(operand, Vector)]
    if name == "__assertfail":

        def fail(warp, mask):
            message, file, line = (_argument(warp, mask, operand) for operand in vectors[-1].items[:3])
            detail = f"{_text(warp, message)} at {_text(warp, file)}:{line & 0xFFFFFFFF}"
            warp.report(Kind.ASSERTION, detail, np.flatnonzero(mask))
            raise Abort

        return fail
    if name == "vprintf":
        # What a kernel prints is for people: nobody is here.
        result = vectors[0].items[0] if len(vectors) > 1 else None

        def skip(warp, mask):
            if result is not None:
                offset = int(warp.rows[result.slot][0])
                warp.local[:, mask, offset : offset + 4] = np.array([0, 1], np.uint8)[:, None, None]
            return DONE

        return skip
    raise UnsupportedInstruction("call", instruction.modifiers, f"functions aren't called here, {name} isn't inline")


def _argument(warp, mask, operand) -> int:
    if isinstance(operand, Immediate):
        return operand.value
    offset = int(warp.rows[operand.slot][0])
    return int(warp.local[0, int(mask.argmax()), offset : offset + 8].view(np.uint64)[0])


def _text(warp, address: int) -> str:
    region = warp.machine.memory.find(address)
    if region is None:
        return f"{address:#x}"
    data = bytes(region.data[address - region.base : region.size])
    return data.split(b"\0")[0].decode(errors="replace")
