"""mbarrier.*: the objects of a CTA, and who waits for what at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .alu_types import Modifiers
from .checks import Kind
from .handlers import BLOCKED, DONE, LANES, handles, mask_of
from .mbarrier import Mbarrier, MbarrierError
from .memory import LOCAL_WINDOW, SHARED_WINDOW
from .program import Address, Instruction
from .races import Knowledge, join_all

_CONTENT = np.uint64(0xB0A2_71E4_B0A2_71E4)  # what lies in an object's bytes: a store that replaces it is noticed
_SPACES = ("shared::cta", "shared", "shared::cluster")
_GIVES_UP = 1 / 8  # how often a try_wait returns although the phase isn't complete


class Handed(NamedTuple):
    """What an arrival, or the bytes of a copy, bring to a phase."""

    knowledge: Knowledge | None
    copy: object | None = None  # whose completion it is


@dataclass(eq=False)
class BarrierObject:
    barrier: Mbarrier
    initialiser: int  # the agent of the thread that ran init
    instruction: Instruction
    fenced: bool = False  # for the async proxy

    def __str__(self) -> str:
        return str(self.barrier)


def shared_addresses(warp, operand: Address, mask: np.ndarray) -> np.ndarray:
    """int64[32] shared addresses of an operand that may be generic."""
    row = (warp.read(operand.base, mask) + np.uint64(operand.offset & (1 << 64) - 1)).view(np.int64)
    return np.where((row >= SHARED_WINDOW) & (row < LOCAL_WINDOW), row - SHARED_WINDOW, row)


def use_barrier(warp, address: int, lanes: np.ndarray) -> BarrierObject | None:
    """The object at an address, for threads that use it. None after a report."""
    found = warp.cta.mbarriers.get(address)
    shared = warp.cta.shared
    if found is None:
        warp.report(Kind.MBARRIER, f"no mbarrier was initialised at {shared.describe(address)}", lanes)
        return None
    content = shared.data[address : address + 8].view(np.uint64)[0]
    if content != _CONTENT:
        detail = f"the mbarrier at {shared.describe(address)} was overwritten"
        warp.report(Kind.MBARRIER, detail, lanes, other=found.instruction.index)
        shared.data[address : address + 8].view(np.uint64)[0] = _CONTENT
    # An init that isn't ordered before this use is a race.
    shared.atomic_index(warp, lanes, np.full(len(lanes), address, np.uint64), 8)
    return found


def _each(warp, operand: Address, mask: np.ndarray):
    """(lane, address, object) of the lanes whose object exists."""
    lanes = np.flatnonzero(mask)
    addresses = shared_addresses(warp, operand, mask)[lanes]
    for address in dict.fromkeys(addresses.tolist()):
        together = lanes[addresses == address]
        found = use_barrier(warp, address, together)
        if found is not None:
            for lane in together.tolist():
                yield lane, address, found


def _guarded(warp, lane: int, action) -> int:
    """Runs an action on an object; what is undefined becomes a report, and gives 0."""
    try:
        return action() or 0
    except MbarrierError as error:
        warp.report(Kind.MBARRIER, str(error), [lane])
        return 0


@handles("mbarrier.init")
def compile_init(instruction: Instruction):
    address, count = instruction.operands

    def step(warp, mask):
        addresses, counts = shared_addresses(warp, address, mask), warp.read(count, mask)
        for lane in np.flatnonzero(mask):
            _init(warp, int(lane), int(addresses[lane]), int(counts[lane]), instruction)
        return DONE

    return step


def _init(warp, lane: int, address: int, count: int, instruction: Instruction) -> None:
    cta = warp.cta
    if address in cta.mbarriers:
        detail = f"init of the live mbarrier at {cta.shared.describe(address)}, without mbarrier.inval"
        warp.report(Kind.MBARRIER, detail, [lane], other=cta.mbarriers[address].instruction.index)
    content = np.full((1, 1), _CONTENT)
    cta.shared.store(warp, np.array([lane]), np.array([address], np.uint64), content, 8, False)
    try:
        barrier = Mbarrier(count)
    except MbarrierError as error:
        warp.report(Kind.MBARRIER, str(error), [lane])
        barrier = Mbarrier(1)
    cta.mbarriers[address] = BarrierObject(barrier, int(warp.clocks.agents[lane]), instruction)
    warp.clocks.tick(mask_of(1 << lane))


def fence_barriers(warp, mask: np.ndarray) -> None:
    """The lanes make what they initialised visible to the async proxy."""
    agents = set(warp.clocks.agents[mask].tolist())
    for found in warp.cta.mbarriers.values():
        found.fenced = found.fenced or found.initialiser in agents


@handles("mbarrier.inval")
def compile_inval(instruction: Instruction):
    (address,) = instruction.operands

    def step(warp, mask):
        for lane, where, _ in _each(warp, address, mask):
            content = np.zeros((1, 1), np.uint64)
            warp.cta.shared.store(warp, np.array([lane]), np.array([where], np.uint64), content, 8, False)
            del warp.cta.mbarriers[where]
        return DONE

    return step


@handles("mbarrier.expect_tx", "mbarrier.complete_tx")
def compile_tx(instruction: Instruction):
    address, size = instruction.operands
    expects = instruction.modifiers[0] == "expect_tx"

    def step(warp, mask):
        sizes = warp.read(size, mask)
        for lane, _, found in _each(warp, address, mask):
            change = found.barrier.expect_tx if expects else lambda n, b=found.barrier: b.complete_tx(n, Handed(None))
            _guarded(warp, lane, lambda change=change, lane=lane: change(int(sizes[lane])))
        warp.machine.wake()
        return DONE

    return step


@handles("mbarrier.arrive", "mbarrier.arrive_drop")
def compile_arrive(instruction: Instruction):
    mods = Modifiers("mbarrier", instruction.modifiers)
    drop = mods.choice("arrive", "arrive_drop") == "arrive_drop"
    expects, complete = mods.flag("expect_tx"), not mods.flag("noComplete")
    relaxed = mods.choice("release", "relaxed", default="release") == "relaxed"
    mods.choice("cta", "cluster", default="cta")
    mods.choice(*_SPACES, default="generic")
    mods.type("b64")
    mods.done()
    destination, address, *rest = instruction.operands
    amount = rest[0] if rest else None

    def arrive(warp, lane: int, barrier: Mbarrier, value: int) -> int:
        knowledge = None if relaxed else warp.clocks.release(mask_of(1 << lane))
        if expects:
            barrier.expect_tx(value)
        count = 1 if expects else value
        handed = Handed(knowledge)
        return barrier.drop(handed, count) if drop else barrier.arrive(handed, count, complete)

    def step(warp, mask):
        amounts = warp.read(amount, mask) if amount is not None else np.ones(LANES, np.uint64)
        states = np.zeros(LANES, np.uint64)
        for lane, _, found in _each(warp, address, mask):
            value = int(amounts[lane])
            states[lane] = _guarded(warp, lane, lambda lane=lane, b=found.barrier, v=value: arrive(warp, lane, b, v))
        warp.write(destination, states, mask)
        warp.machine.wake()
        return DONE

    return step


@handles("mbarrier.try_wait", "mbarrier.test_wait", may_block=True)
def compile_wait(instruction: Instruction):
    """try_wait suspends until the phase is complete, so that a wait for ever is seen as one; test_wait never does.

    But it may give up at any time, as on a GPU after a time limit: who doesn't try again goes on too early.
    """
    mods = Modifiers("mbarrier", instruction.modifiers)
    suspends = mods.choice("try_wait", "test_wait") == "try_wait"
    by_parity = mods.flag("parity")
    relaxed = mods.choice("acquire", "relaxed", default="acquire") == "relaxed"
    mods.choice("cta", "cluster", default="cta")
    mods.choice(*_SPACES, default="generic")
    mods.type("b64")
    mods.done()
    destination, address, phase = instruction.operands[:3]

    def step(warp, mask):
        phases = warp.read(phase, mask)
        passed = np.zeros(LANES, bool)
        seen: dict[int, BarrierObject] = {}
        used = 0
        for lane, where, found in _each(warp, address, mask):
            used += 1
            test = found.barrier.test_parity if by_parity else found.barrier.test_state
            if test(int(phases[lane])):
                passed[lane] = True
                seen[where] = found
        if suspends and used and not passed.any() and warp.machine.random.random() >= _GIVES_UP:
            return BLOCKED
        if not used:
            passed = mask.copy()  # reported; waiting would only hide what follows
        if not relaxed:
            for found in seen.values():
                _acquire(warp, found, passed)
        warp.write(destination, passed.astype(np.uint64), mask)
        return DONE

    return step


def _acquire(warp, found: BarrierObject, mask: np.ndarray) -> None:
    parts = [handed.knowledge for handed in found.barrier.released if handed.knowledge is not None]
    for handed in found.barrier.released:
        if handed.copy is not None:
            handed.copy.awaited = True
    if parts:
        warp.clocks.acquire(join_all(parts), mask)


@handles("mbarrier.pending_count")
def compile_pending_count(instruction: Instruction):
    destination, state = instruction.operands

    def step(warp, mask):
        warp.write(destination, warp.read(state, mask) & np.uint64(0xFFFFFFFF), mask)
        return DONE

    return step
