"""Vector clocks: which accesses are ordered, and which race.

Every thread is an agent, and so is every asynchronous operation (a bulk copy, a wgmma). An agent's time goes up when it
releases. A *stamp* is `time << AGENT_BITS | agent`: shadow memory keeps the stamp of the last write of each byte.
A *Knowledge* says of each agent up to which stamp an access is ordered before what its owner does next. Threads that
met at a barrier share one Knowledge object, so a barrier costs one vector, not one a thread.
"""

from __future__ import annotations

import numpy as np

from .handlers import FULL, LANES, mask_of

AGENT_BITS = 24
AGENT_MASK = (1 << AGENT_BITS) - 1
NOBODY, HOST = 0, 1  # agents. NOBODY's stamp 0 is "never written"; what the HOST wrote is ordered before the launch
HOST_STAMP = HOST
RED_ZONE = -1  # the stamp of bytes that belong to nothing
_GROWTH = 256


class Knowledge:
    """Immutable. `seen[a]`: accesses of agent a with a stamp up to this are ordered. `fenced[a]`: of these, the
    writes that a itself passed to the async proxy with fence.proxy.async. Both int64, maybe shorter than the number
    of agents: the rest is unknown."""

    __slots__ = ("fenced", "seen")

    def __init__(self, seen: np.ndarray, fenced: np.ndarray):
        self.seen = seen
        self.fenced = fenced

    def widen(self, size: int) -> None:
        """Makes room for agents that came later. They are unknown, so this changes no meaning."""
        if len(self.seen) < size:
            more = np.zeros(-(-size // _GROWTH) * _GROWTH - len(self.seen), np.int64)
            self.seen = np.concatenate([self.seen, more])
            self.fenced = np.concatenate([self.fenced, more])

    def join(self, other: Knowledge | None) -> Knowledge:
        if other is None or other is self:
            return self
        self.widen(len(other.seen))
        other.widen(len(self.seen))
        return Knowledge(np.maximum(self.seen, other.seen), np.maximum(self.fenced, other.fenced))


def join_all(parts) -> Knowledge:
    """The join of one or more Knowledge objects, each counted once."""
    distinct = list({id(part): part for part in parts}.values())
    if len(distinct) == 1:
        return distinct[0]
    # A whole number of steps, so that those that grow and those that are long enough end up equal.
    size = -(-max(len(part.seen) for part in distinct) // _GROWTH) * _GROWTH
    for part in distinct:
        part.widen(size)
    return Knowledge(
        np.maximum.reduce([part.seen for part in distinct]), np.maximum.reduce([part.fenced for part in distinct])
    )


class Clocks:
    """The agents of one launch."""

    def __init__(self):
        self.count = 2
        self.asynchronous = np.zeros(_GROWTH, bool)  # by agent
        self.generic = np.zeros(_GROWTH, bool)  # asynchronous, and yet in the proxy that threads use: cp.async
        seen = np.zeros(_GROWTH, np.int64)
        seen[HOST] = AGENT_MASK
        self.start = Knowledge(seen, seen.copy())  # of a thread when it starts

    def add(self, count: int, asynchronous: bool = False) -> int:
        """New agents with consecutive numbers; returns the first."""
        first, self.count = self.count, self.count + count
        if self.count > AGENT_MASK:
            raise OverflowError(f"more than {AGENT_MASK} threads and asynchronous operations in one launch")
        if self.count > len(self.asynchronous):
            self.asynchronous = np.resize(self.asynchronous, -(-self.count // _GROWTH) * _GROWTH * 2)
            self.asynchronous[first:] = False
            self.generic = np.resize(self.generic, len(self.asynchronous))
            self.generic[first:] = False
        self.asynchronous[first : self.count] = asynchronous
        return first

    def async_agent(self) -> int:
        return self.add(1, asynchronous=True)

    def copy_agents(self, count: int) -> np.ndarray:
        """int64[count]: for the cp.async of each of so many threads."""
        first = self.add(count, asynchronous=True)
        self.generic[first : first + count] = True
        return np.arange(first, first + count, dtype=np.int64)

    def completion(self, agent: int) -> Knowledge:
        """What one learns from the completion of an asynchronous operation: its own accesses, nothing else."""
        seen = np.zeros(agent + 1, np.int64)
        seen[agent] = async_stamp(agent)
        return Knowledge(seen, seen.copy())


def _look_up(knowledge: Knowledge, agents: np.ndarray) -> np.ndarray:
    try:
        return knowledge.seen[agents]
    except IndexError:
        knowledge.widen(int(agents.max()) + 1)
        return knowledge.seen[agents]


def _look_up_each(knowledge: list[Knowledge], lanes: np.ndarray, agents: np.ndarray) -> np.ndarray:
    result = np.empty(agents.shape, np.int64)
    groups: dict[int, list[int]] = {}
    for row, lane in enumerate(lanes):
        groups.setdefault(id(knowledge[lane]), []).append(row)
    for rows in groups.values():
        result[rows] = _look_up(knowledge[lanes[rows[0]]], agents[rows])
    return result


def async_stamp(agent: int) -> int:
    """All accesses of a bulk copy or a wgmma have time 1."""
    return 1 << AGENT_BITS | agent


class ThreadClocks:
    """The clocks of a warp's lanes."""

    def __init__(self, clocks: Clocks, first_agent: int, absent: np.ndarray):
        self._clocks = clocks
        self._absent = absent  # bool[32]: lanes that the block hasn't
        self.agents = np.arange(first_agent, first_agent + LANES, dtype=np.int64)
        self.own = self.agents  # whose accesses need no order with those of the lane
        self.stamps = 1 << AGENT_BITS | self.agents  # of an access now
        self._fenced = np.zeros(LANES, np.int64)  # stamp of the last write that the lane passed to the async proxy
        self.knowledge = [clocks.start] * LANES
        self.uniform = True  # all lanes share one Knowledge

    def limits(self, lanes: np.ndarray, agents: np.ndarray) -> np.ndarray:
        """For each lane (a row of `agents`): up to which stamp it knows the agents. Both arrays may be [lanes, n]."""
        if self.uniform:
            return _look_up(self.knowledge[0], agents)
        return _look_up_each(self.knowledge, lanes, agents)

    def release(self, mask: np.ndarray = FULL) -> Knowledge:
        """What the lanes together have to hand over now. Their later accesses are not part of it."""
        snapshot = self.snapshot(mask)
        self.tick(mask)
        return snapshot

    def tick(self, mask: np.ndarray) -> None:
        """Later accesses of the lanes get later stamps."""
        self.stamps = self.stamps + (mask.astype(np.int64) << AGENT_BITS)

    def snapshot(self, mask: np.ndarray = FULL) -> Knowledge:
        lanes = np.flatnonzero(mask)
        joined = self.knowledge[lanes[0]] if self.uniform else join_all(self.knowledge[lane] for lane in lanes)
        joined.widen(int(self.agents[-1]) + 1)
        seen, fenced = joined.seen.copy(), joined.fenced.copy()
        seen[self.agents[lanes]] = self.stamps[lanes]
        fenced[self.agents[lanes]] = self._fenced[lanes]
        return Knowledge(seen, fenced)

    def acquire(self, knowledge: Knowledge | None, mask: np.ndarray = FULL) -> None:
        """The lanes learn something in addition to what they know."""
        if knowledge is None:
            return
        if self.uniform and self._is_whole(mask):
            self.knowledge = [self.knowledge[0].join(knowledge)] * LANES
            return
        joined: dict[int, Knowledge] = {}
        for lane in np.flatnonzero(mask):
            old = self.knowledge[lane]
            if id(old) not in joined:
                joined[id(old)] = old.join(knowledge)
            self.knowledge[lane] = joined[id(old)]
        self._find_uniform()

    def replace(self, knowledge: Knowledge, mask: np.ndarray = FULL) -> None:
        """The lanes learn something that contains all they know: what a barrier they took part in hands out."""
        if self._is_whole(mask):
            self.knowledge = [knowledge] * LANES
            self.uniform = True
            return
        for lane in np.flatnonzero(mask):
            self.knowledge[lane] = knowledge
        self._find_uniform()

    def synchronise(self, mask: np.ndarray) -> None:
        """The lanes see each other's accesses: bar.warp.sync."""
        self.replace(self.release(mask), mask)

    def fence_proxy(self, mask: np.ndarray) -> None:
        """fence.proxy.async: the lanes' own writes so far become visible to the async proxy once it has learnt of
        them. So do those of the cp.async that they know to be complete, which can't fence for themselves."""
        self._fenced = np.where(mask, self.stamps, self._fenced)
        self.tick(mask)
        if self._clocks.generic.any():
            copies = np.flatnonzero(self._clocks.generic)
            for lane in np.flatnonzero(mask):
                known = self.knowledge[lane]
                known.widen(int(copies[-1]) + 1)
                if (known.fenced[copies] < known.seen[copies]).any():
                    fenced = known.fenced.copy()
                    fenced[copies] = known.seen[copies]
                    self.acquire(Knowledge(known.seen, fenced), mask_of(1 << int(lane)))

    def _is_whole(self, mask: np.ndarray) -> bool:
        return mask is FULL or bool((mask | self._absent).all())

    def _find_uniform(self) -> None:
        first = self.knowledge[0]
        self.uniform = all(knowledge is first for knowledge in self.knowledge)


class CopyClocks:
    """The clocks of the cp.async of a warp's lanes: each knows what its thread knew when it started it. In the place of
    ThreadClocks for who checks accesses."""

    uniform = False

    def __init__(self, threads: ThreadClocks, agents: np.ndarray, stamps: np.ndarray):
        self.agents, self.stamps = agents, stamps
        self.own = np.full(LANES, -1, np.int64)  # copies of one thread aren't ordered either
        self._knowledge = [threads.knowledge[0]] if threads.uniform else list(threads.knowledge)
        self._thread_agents, self._thread_stamps = threads.agents, threads.stamps

    def limits(self, lanes: np.ndarray, agents: np.ndarray) -> np.ndarray:
        if len(self._knowledge) == 1:
            known = _look_up(self._knowledge[0], agents)
        else:
            known = _look_up_each(self._knowledge, lanes, agents)
        shape = (-1, *[1] * (agents.ndim - 1))
        mine = agents == self._thread_agents[lanes].reshape(shape)
        return np.where(mine, self._thread_stamps[lanes].reshape(shape), known)
