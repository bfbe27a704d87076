"""cp.async.bulk: each copy is an agent of its own that reads and writes when the scheduler lets it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .alu_types import Modifiers
from .bulk import Copy, Groups, problems_of_bulk_copy
from .checks import Kind
from .handlers import BLOCKED, DONE, handles, mask_of
from .handlers_mbarrier import Handed, shared_addresses, use_barrier
from .mbarrier import MbarrierError
from .memory import AsyncAccess
from .program import Address, Immediate, Instruction
from .races import Knowledge

_TO_SHARED = ("shared::cluster", "shared::cta")


def _global_addresses(warp, operand: Address, mask: np.ndarray) -> np.ndarray:
    return warp.read(operand.base, mask) + np.uint64(operand.offset & (1 << 64) - 1)


class _Side:
    """One side of a copy: an agent, and what it may rely on."""

    def __init__(self, warp, knowledge: Knowledge):
        self.agent = warp.machine.clocks.async_agent()
        self.access = AsyncAccess(warp, self.agent, knowledge)
        self.clocks = warp.machine.clocks

    def completion(self) -> Knowledge:
        return self.clocks.completion(self.agent)


def _global_region(warp, access: AsyncAccess, address: int, size: int, verb: str):
    memory = warp.machine.memory
    region = memory.find(address)
    if region is None:
        near = memory.nearest(address)
        where = near.describe(address - near.base) if near else "no tensor"
        access.report(Kind.OUT_OF_BOUNDS, f"{verb} {size} bytes at {address:#x}, {where}")
    return region


def _overwritten_barriers(warp, access: AsyncAccess, address: int, size: int) -> None:
    for where, found in warp.cta.mbarriers.items():
        if address < where + 8 and where < address + size:
            detail = f"writes over the mbarrier at {warp.cta.shared.describe(where)}"
            access.report(Kind.MBARRIER, detail, found.instruction.index)


# ------------------------------------------------------------------------------------------------- global to shared


@handles("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def compile_load(instruction: Instruction):
    mods = Modifiers("cp", instruction.modifiers)
    hinted = _take(mods, "async", "bulk", "global", "mbarrier::complete_tx::bytes")
    mods.choice(*_TO_SHARED)
    mods.done()
    destination, source, size, barrier = instruction.operands[:4]
    assert len(instruction.operands) == 4 + hinted

    def step(warp, mask):
        to, bars = shared_addresses(warp, destination, mask), shared_addresses(warp, barrier, mask)
        sources, sizes = _global_addresses(warp, source, mask), warp.read(size, mask)
        for lane in np.flatnonzero(mask):
            _load(warp, int(lane), int(to[lane]), int(sources[lane]), int(sizes[lane]), int(bars[lane]))
        return DONE

    return step


def _take(mods: Modifiers, *parts: str) -> bool:
    """Takes modifiers that must be there; returns whether a cache hint is."""
    for part in parts:
        mods.choice(part)
    return mods.flag("L2::cache_hint")


def _load(warp, lane: int, destination: int, source: int, size: int, barrier_address: int) -> None:
    for problem in problems_of_bulk_copy(destination, source, size):
        warp.report(Kind.MISALIGNED, problem, [lane])
    found = use_barrier(warp, barrier_address, np.array([lane]))
    if found is not None and not found.fenced:
        detail = "the mbarrier's init isn't visible to bulk copies: no fence.mbarrier_init and no fence.proxy.async"
        warp.report(Kind.PROXY, detail, [lane], other=found.instruction.index)
        found.fenced = True
    side = _Side(warp, warp.clocks.release(mask_of(1 << lane)))
    copy = Copy(side.agent)
    _expect_to_be_awaited(warp, copy, "bulk copy to shared memory")

    def complete() -> None:
        region = _global_region(warp, side.access, source, size, "reads")
        data = region.async_read(side.access, source, size) if region else None
        if data is not None:
            warp.machine.counters.bulk(region, source, size, False)
            _overwritten_barriers(warp, side.access, destination, size)
            warp.cta.shared.async_write(side.access, destination, data)
        if found is not None:
            try:
                found.barrier.complete_tx(size, Handed(side.completion(), copy))
            except MbarrierError as error:
                side.access.report(Kind.MBARRIER, str(error))

    warp.cta.post(warp, complete, f"a bulk copy of {size} bytes to {warp.cta.shared.describe(destination)}")


def _expect_to_be_awaited(warp, copy: Copy, what: str) -> None:
    instruction = warp.current

    def check() -> None:
        if not copy.awaited:
            warp.report(Kind.PENDING_AT_EXIT, f"nobody waited for this {what}", instruction=instruction)

    warp.cta.at_exit.append(check)


# ------------------------------------------------------------------------------------------------- shared to global


@dataclass(eq=False, kw_only=True)
class _Store(Copy):
    reader: _Side
    writer: _Side


@handles("cp.async.bulk.global")
def compile_store(instruction: Instruction):
    mods = Modifiers("cp", instruction.modifiers)
    _take(mods, "async", "bulk", "global", "shared::cta", "bulk_group")
    mods.done()
    destination, source, size = instruction.operands[:3]

    def step(warp, mask):
        to, sizes = _global_addresses(warp, destination, mask), warp.read(size, mask)
        sources = shared_addresses(warp, source, mask)
        for lane in np.flatnonzero(mask):
            _store(warp, int(lane), int(to[lane]), int(sources[lane]), int(sizes[lane]))
        return DONE

    return step


def _store(warp, lane: int, destination: int, source: int, size: int) -> None:
    for problem in problems_of_bulk_copy(destination, source, size):
        warp.report(Kind.MISALIGNED, problem, [lane])
    knowledge = warp.clocks.release(mask_of(1 << lane))
    # Two agents: who waits only for the source to be read knows nothing of what was written.
    store = _Store(reader=_Side(warp, knowledge), writer=_Side(warp, knowledge))
    _groups(warp, lane).add(store)
    _expect_to_be_awaited(warp, store, "bulk copy from shared memory")
    data: list[np.ndarray | None] = []

    def read() -> None:
        if not store.read:
            store.read = True
            found = warp.cta.shared.async_read(store.reader.access, source, size)
            data.append(None if found is None else found.copy())

    def write() -> None:
        read()
        store.written = True
        region = _global_region(warp, store.writer.access, destination, size, "writes")
        if region is not None and data[0] is not None:
            warp.machine.counters.bulk(region, destination, size, True)
            region.async_write(store.writer.access, destination, data[0])

    text = f"a bulk copy of {size} bytes from {warp.cta.shared.describe(source)}"
    warp.cta.post(warp, read, text)
    warp.cta.post(warp, write, text)


def _groups(warp, lane: int) -> Groups:
    return warp.copy_groups.setdefault(lane, Groups())


def _wait(warp, mask: np.ndarray, newest: int, reads_only: bool) -> int:
    lanes = [int(lane) for lane in np.flatnonzero(mask)]
    for lane in lanes:
        for copy in _groups(warp, lane).older_than(newest):
            if not (copy.read if reads_only else copy.written):
                return BLOCKED
    for lane in lanes:
        groups, one = _groups(warp, lane), mask_of(1 << lane)
        for copy in groups.older_than(newest):
            copy.awaited = True
            warp.clocks.acquire(copy.reader.completion(), one)
            if not reads_only:
                warp.clocks.acquire(copy.writer.completion(), one)
        if not reads_only:
            groups.retire(newest)
    return DONE


@handles("cp.async.bulk.commit_group")
def compile_commit(instruction: Instruction):
    def step(warp, mask):
        for lane in np.flatnonzero(mask):
            _groups(warp, int(lane)).commit()
        return DONE

    return step


@handles("cp.async.bulk.wait_group", may_block=True)
def compile_wait(instruction: Instruction):
    reads_only = "read" in instruction.modifiers
    (newest,) = instruction.operands
    assert isinstance(newest, Immediate)

    def step(warp, mask):
        return _wait(warp, mask, newest.value, reads_only)

    return step


@handles("cp.async.bulk.prefetch")
def compile_prefetch(instruction: Instruction):
    mods = Modifiers("cp", instruction.modifiers)
    _take(mods, "async", "bulk", "prefetch", "L2", "global")
    mods.done()
    source, size = instruction.operands[:2]

    def step(warp, mask):
        sources, sizes = _global_addresses(warp, source, mask), warp.read(size, mask)
        for lane in np.flatnonzero(mask):
            address, count = int(sources[lane]), int(sizes[lane])
            for problem in problems_of_bulk_copy(0, address, count):
                warp.report(Kind.MISALIGNED, problem, [lane])
            region = warp.machine.memory.find(address)
            if region is None or address + count > region.base + region.size:
                warp.report(Kind.OUT_OF_BOUNDS, f"prefetches {count} bytes at {address:#x}", [lane])
            else:
                warp.machine.counters.prefetched.add((region.name, address - region.base, count))
        return DONE

    return step
