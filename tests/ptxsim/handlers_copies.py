"""cp.async: the copies of one instruction happen together, when the scheduler lets them.

They are in the generic proxy: all that a copy's thread wrote and knows is there for it without fence.proxy.async, and
what it writes needs one as a thread's does. Each thread has an agent of its own for its copies, whose time goes up with
each group and each arrival: who has waited for one of these knows of that and of older copies, and of no newer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .alu_types import Modifiers
from .bulk import problems_of_async_copy
from .checks import Kind
from .handlers import BLOCKED, DONE, LANES, handles, mask_of
from .handlers_mbarrier import Handed, shared_addresses, use_barrier
from .mbarrier import MbarrierError
from .program import Immediate, Instruction
from .races import AGENT_BITS, CopyClocks, Knowledge


@dataclass(eq=False)
class _Copies:
    """Of one instruction."""

    mask: np.ndarray  # bool[32]
    groups: np.ndarray  # int64[32]: which of its thread's groups each belongs to
    stamps: np.ndarray  # int64[32]
    awaited: np.ndarray  # bool[32]
    complete: Callable[[], None]
    done: bool = False

    def finished(self) -> bool:
        return bool((self.awaited | ~self.mask).all())


class ThreadCopies:
    """Of the threads of a warp."""

    def __init__(self, warp):
        self.agents = warp.machine.clocks.copy_agents(LANES)
        self.group = np.zeros(LANES, np.int64)
        self.time = np.ones(LANES, np.int64)
        self.outstanding: list[_Copies] = []

    @property
    def stamps(self) -> np.ndarray:
        return self.time << AGENT_BITS | self.agents

    def commit(self, mask: np.ndarray) -> None:
        self.group = self.group + mask
        self.time = self.time + mask

    def completion(self, lane: int, stamp: int) -> Knowledge:
        """What one learns when all copies of a thread up to a stamp are complete. Not passed to the async proxy."""
        seen = np.zeros(int(self.agents[lane]) + 1, np.int64)
        seen[self.agents[lane]] = stamp
        return Knowledge(seen, np.zeros_like(seen))


def _copies_of(warp) -> ThreadCopies:
    if warp.thread_copies is None:
        warp.thread_copies = ThreadCopies(warp)
    return warp.thread_copies


class _Accessor:
    """Stands for the warp where memory asks who accesses it: later, and as the threads were at the instruction."""

    def __init__(self, warp, stamps: np.ndarray, agents: np.ndarray):
        self.current = warp.current
        self.clocks = CopyClocks(warp.clocks, agents, stamps)
        self._warp = warp

    @property
    def machine(self):
        return self._warp.machine

    def report(self, kind: Kind, detail: str, lanes=None, other: int = -1) -> None:
        self._warp.report(kind, detail, lanes, other, self.current)

    def conflict(self, lanes: np.ndarray):
        def report(kind: Kind, rows: np.ndarray, detail: str, other: int) -> None:
            self.report(kind, detail, lanes[rows], other)

        return report


@handles("cp.async.ca", "cp.async.cg")
def compile_copy(instruction: Instruction):
    mods = Modifiers("cp", instruction.modifiers)
    mods.choice("async")
    mods.choice("global")
    mods.choice("ca", "cg")
    mods.choice("shared", "shared::cta")
    mods.choice("L2::64B", "L2::128B", "L2::256B", default="none")
    hinted = mods.flag("L2::cache_hint")
    mods.done()
    destination, source, size, *rest = instruction.operands
    read_size = rest[0] if len(rest) > hinted else size  # the cache policy comes last

    def step(warp, mask):
        to = shared_addresses(warp, destination, mask)
        sources = warp.read(source.base, mask) + np.uint64(source.offset & (1 << 64) - 1)
        count, counts = warp.read_scalar(size, mask), warp.read(read_size, mask).astype(np.int64)
        lanes = []
        for lane in np.flatnonzero(mask).tolist():
            problems = problems_of_async_copy(int(to[lane]), int(sources[lane]), count, int(counts[lane]))
            for problem in problems:
                warp.report(Kind.MISALIGNED, problem, [lane])
            if not problems:
                lanes.append(lane)
        _start(warp, mask, np.array(lanes, np.int64), to, sources, count, counts)
        return DONE

    return step


def _start(warp, mask, lanes, to, sources, size: int, read_sizes) -> None:
    """The copies of `lanes`, whose operands are good; who waits, waits for all in `mask`."""
    thread_copies, instruction = _copies_of(warp), warp.current
    stamps = thread_copies.stamps
    accessor = _Accessor(warp, stamps, thread_copies.agents)
    warp.clocks.tick(mask)

    def complete() -> None:
        if copies.done:
            return  # an arrival has waited for it
        copies.done = True
        if len(lanes):
            values = _read(accessor, lanes, sources, size, read_sizes)
            warp.cta.shared.store(accessor, lanes, to[lanes].astype(np.uint64), values.view(np.uint32), 4, False)

    def check() -> None:
        if not copies.finished():
            forgotten = np.flatnonzero(copies.mask & ~copies.awaited)
            warp.report(Kind.PENDING_AT_EXIT, "nobody waited for this cp.async", forgotten, instruction=instruction)

    copies = _Copies(mask.copy(), thread_copies.group, stamps, np.zeros(LANES, bool), complete)
    thread_copies.outstanding.append(copies)
    warp.cta.at_exit.append(check)
    warp.cta.post(warp, complete, f"cp.async of {size} bytes each")


def _read(accessor: _Accessor, lanes, sources, size: int, read_sizes) -> np.ndarray:
    """uint8[lanes, size]; what isn't read is zero."""
    values = np.zeros((len(lanes), size), np.uint8)
    sizes = read_sizes[lanes]
    whole = np.flatnonzero(sizes == size)
    for rows, region in _by_region(accessor, lanes, sources, size, whole):
        found = region.load(accessor, lanes[rows], sources[lanes[rows]], 4, size // 4, False)
        values[rows] = found.view(np.uint8)
    for row in np.flatnonzero((sizes != size) & (sizes != 0)):
        count = int(sizes[row])
        for _, region in _by_region(accessor, lanes, sources, count, np.array([row])):
            addresses = sources[lanes[row]] + np.arange(count, dtype=np.uint64)
            values[row, :count] = region.load(accessor, np.repeat(lanes[row], count), addresses, 1, 1, False)[:, 0]
    return values


def _by_region(accessor: _Accessor, lanes, sources, size: int, rows):
    """Yields (rows, region). Reports what lies nowhere."""
    memory = accessor.machine.memory
    by_region: dict[int, tuple[object, list[int]]] = {}
    region = None
    for row in rows.tolist():
        address = int(sources[lanes[row]])
        if region is None or not region.base <= address < region.base + region.size:
            region = memory.find(address)
        if region is None:
            near = memory.nearest(address)
            where = near.describe(address - near.base) if near else "no tensor"
            accessor.report(Kind.OUT_OF_BOUNDS, f"reads {size} bytes at {address:#x}, {where}", lanes[[row]])
        else:
            by_region.setdefault(id(region), (region, []))[1].append(row)
    for found, members in by_region.values():
        yield np.array(members), found


# ------------------------------------------------------------------------------------------------------------- waiting


@handles("cp.async.commit_group")
def compile_commit(instruction: Instruction):
    def step(warp, mask):
        _copies_of(warp).commit(mask)
        return DONE

    return step


@handles("cp.async.wait_group", may_block=True)
def compile_wait_group(instruction: Instruction):
    (newest,) = instruction.operands
    assert isinstance(newest, Immediate)

    def step(warp, mask):
        copies = _copies_of(warp)
        return _wait(warp, mask, copies, copies.group - newest.value)

    return step


@handles("cp.async.wait_all", may_block=True)
def compile_wait_all(instruction: Instruction):
    def step(warp, mask):
        copies = _copies_of(warp)
        return _wait(warp, mask, copies, copies.group + 1)  # the open one as well

    return step


def _wait(warp, mask: np.ndarray, copies: ThreadCopies, end: np.ndarray) -> int:
    """For the groups before `end`, of each lane its own."""
    covered = [(copy, copy.mask & mask & (copy.groups < end)) for copy in copies.outstanding]
    covered = [(copy, part) for copy, part in covered if part.any()]
    if not all(copy.done for copy, _ in covered):
        return BLOCKED
    if not covered:
        return DONE
    for copy, part in covered:
        copy.awaited |= part
    newest = np.maximum.reduce([np.where(part, copy.stamps, 0) for copy, part in covered])
    for lane in np.flatnonzero(newest).tolist():
        warp.clocks.acquire(copies.completion(lane, int(newest[lane])), mask_of(1 << lane))
    # A later copy of an open group is not what was waited for.
    copies.time = copies.time + (newest > 0)
    copies.outstanding = [copy for copy in copies.outstanding if not copy.finished()]
    return DONE


@dataclass(eq=False)
class _Awaited:
    """One thread's copies of an instruction, as an mbarrier hands them over."""

    copies: _Copies
    lane: int

    @property
    def awaited(self) -> bool:
        return bool(self.copies.awaited[self.lane])

    @awaited.setter
    def awaited(self, value: bool) -> None:
        self.copies.awaited[self.lane] = value


@handles("cp.async.mbarrier.arrive")
def compile_arrive(instruction: Instruction):
    """Arrives when the cp.async that the thread has started so far are complete."""
    mods = Modifiers("cp", instruction.modifiers)
    for part in ("async", "mbarrier", "arrive"):
        mods.choice(part)
    counted = mods.flag("noinc")  # among the arrivals that the mbarrier expects
    mods.choice("shared", "shared::cta", default="generic")
    mods.type("b64")
    mods.done()
    (address,) = instruction.operands

    def step(warp, mask):
        where = shared_addresses(warp, address, mask)
        for lane in np.flatnonzero(mask):
            _arrive_later(warp, int(lane), int(where[lane]), counted, instruction)
        return DONE

    return step


def _arrive_later(warp, lane: int, address: int, counted: bool, instruction: Instruction) -> None:
    found = use_barrier(warp, address, np.array([lane]))
    if found is None:
        return
    if not counted:
        found.barrier.pending += 1
    copies = _copies_of(warp)
    mine = [copy for copy in copies.outstanding if copy.mask[lane] and not copy.awaited[lane]]
    knowledge = copies.completion(lane, int(copies.stamps[lane]))
    copies.time = copies.time + mask_of(1 << lane)

    def complete() -> None:
        for copy in mine:
            copy.complete()
            # They are handed over, and what the thread did itself is not.
            found.barrier.complete_tx(0, Handed(knowledge, _Awaited(copy, lane)))
        try:
            found.barrier.arrive(Handed(None))
        except MbarrierError as error:
            warp.report(Kind.MBARRIER, str(error), [lane], instruction=instruction)

    warp.cta.post(warp, complete, "an arrival after cp.async")
