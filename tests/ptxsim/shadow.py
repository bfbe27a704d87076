"""What is known of each byte of a memory region: who wrote it last, who read it since, who changed it atomically."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import sparse
from .accesses import Accesses
from .checks import Kind
from .races import AGENT_MASK, HOST, HOST_STAMP, RED_ZONE, Clocks, Knowledge, ThreadClocks, async_stamp

_PAGE_SHIFT = 14

# conflict(kind, rows, detail, other): rows are those of the access, other an instruction's index or -1
Conflict = Callable[[Kind, np.ndarray, str, int], None]


class _AsyncRead(NamedTuple):
    low: int
    high: int
    agent: int
    at: int  # instruction
    granules: np.ndarray | None  # of 16 bytes, that were read; None: all of them
    chain: int  # of readers that complete in order, -1: of none

    def replaces(self, other: _AsyncRead) -> bool:
        """Who knows that this one is complete knows it of the other as well."""
        same = self.chain >= 0 and self[:2] == other[:2] and self.chain == other.chain
        return same and np.array_equal(self.granules, other.granules)


class Shadow:
    """`size` is a multiple of 16. Bytes start as never written."""

    def __init__(self, size: int, clocks: Clocks):
        self.clocks = clocks
        self.size = size
        self.written = sparse.zeros(size, np.int64)  # stamps
        self._written_at = sparse.zeros(size >> 2, np.int32)  # instructions
        self._dirty = np.zeros((size >> _PAGE_SHIFT) + 1, bool)  # pages that this launch wrote to
        self._by_size = {n: self.written.reshape(-1, n) for n in (1, 2, 4, 8, 16)}
        self._reads = Accesses(size)
        self._atomics = Accesses(size)
        self._strong_reads = Accesses(size)
        self._async_reads: list[_AsyncRead] = []

    def set_red_zone(self, low: int, high: int) -> None:
        """The bytes belong to nothing: touching them is out of bounds."""
        self.written[low:high] = RED_ZONE

    def set_initialised(self, low: int, high: int) -> None:
        """The host wrote the bytes."""
        self.written[low:high] = HOST_STAMP

    def start(self, clocks: Clocks) -> None:
        """A launch begins: all that was written before is ordered before it."""
        self.clocks = clocks
        for page in np.flatnonzero(self._dirty):
            part = self.written[page << _PAGE_SHIFT : (page + 1) << _PAGE_SHIFT]
            np.minimum(part, HOST_STAMP, out=part)
        self._dirty[:] = False
        if self._reads.any:
            self._reads = Accesses(self.size)
        if self._atomics.any:
            self._atomics = Accesses(self.size)
        if self._strong_reads.any:
            self._strong_reads = Accesses(self.size)
        self._async_reads = []

    # Lanes access [index·size, (index+1)·size). These return False, and do nothing, when a byte lies in a red zone.

    def read(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        stamps = self._by_size[size][index]
        low = stamps.min()
        if low <= 0:
            if low == RED_ZONE:
                return False
            self._report_unwritten(stamps, conflict)
        self._against_writes(clocks, lanes, index, size, stamps, conflict, "reads")
        if self._atomics.any and (found := self._atomics.unordered(clocks, lanes, index, size)):
            conflict(Kind.RACE, found[0], "reads what another thread changes atomically, unordered", found[1])
        self._reads.record(clocks, lanes, index, size, at)
        return True

    def strong_read(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        """A volatile, relaxed or acquiring load: it doesn't race with strong writes."""
        stamps = self._by_size[size][index]
        low = stamps.min()
        if low == RED_ZONE:
            return False
        if low == 0:
            self._report_unwritten(stamps, conflict)
        self._against_writes(clocks, lanes, index, size, stamps, conflict, "reads")
        self._strong_reads.record(clocks, lanes, index, size, at)
        return True

    def write(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        view = self._by_size[size]
        stamps = view[index]
        if stamps.min() == RED_ZONE:
            return False
        self._against_writes(clocks, lanes, index, size, stamps, conflict, "writes")
        for accesses, detail in (
            (self._reads, "writes what another thread reads, unordered"),
            (self._strong_reads, "writes what another thread reads, unordered"),
            (self._atomics, "writes what another thread changes atomically, unordered"),
        ):
            if accesses.any:
                if found := accesses.unordered(clocks, lanes, index, size):
                    conflict(Kind.RACE, found[0], detail, found[1])
                accesses.forget(index, size)
        self._against_async_reads(clocks, lanes, index, size, conflict)
        self._dirty[(index * size) >> _PAGE_SHIFT] = True
        view[index] = clocks.stamps[lanes][:, None]
        if size >= 4:
            self._written_at.reshape(-1, size >> 2)[index] = at
        else:
            self._written_at[(index * size) >> 2] = at
        return True

    def atomic(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        """An atomic change, or another strong write: these don't race among themselves, nor with strong reads."""
        stamps = self._by_size[size][index]
        if stamps.min() == 0:
            self._report_unwritten(stamps, conflict)
        return self.atomic_store(clocks, lanes, index, size, at, conflict)

    def atomic_store(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        """One that doesn't read."""
        view = self._by_size[size]
        stamps = view[index]
        low = stamps.min()
        if low == RED_ZONE:
            return False
        if low == 0:
            view[index] = np.maximum(stamps, HOST_STAMP)
        self._against_writes(clocks, lanes, index, size, stamps, conflict, "changes atomically")
        if self._reads.any and (found := self._reads.unordered(clocks, lanes, index, size)):
            conflict(Kind.RACE, found[0], "changes atomically what another thread reads, unordered", found[1])
        self._against_async_reads(clocks, lanes, index, size, conflict)
        self._atomics.record(clocks, lanes, index, size, at)
        return True

    def written_now(self, index: np.ndarray, size: int) -> np.ndarray:
        """Rows that this launch has written to."""
        return np.flatnonzero((self._by_size[size][index] > HOST_STAMP).any(axis=1))

    def _report_unwritten(self, stamps: np.ndarray, conflict: Conflict) -> None:
        rows = np.flatnonzero((stamps == 0).any(axis=1))
        conflict(Kind.UNINITIALISED_MEMORY, rows, "reads bytes never written", -1)

    def _against_writes(self, clocks, lanes, index, size, stamps, conflict, does) -> None:
        agents = stamps & AGENT_MASK
        late = stamps > clocks.limits(lanes, agents)
        if not late.any():
            return
        late &= agents != clocks.own[lanes][:, None]
        if late.any():
            rows = np.flatnonzero(late.any(axis=1))
            row, byte = (int(i[0]) for i in np.nonzero(late))
            other = int(self._written_at[(int(index[row]) * size + byte) >> 2])
            conflict(Kind.RACE, rows, f"{does} bytes that {self._who(int(agents[row, byte]))} wrote, unordered", other)

    def _against_async_reads(self, clocks, lanes, index, size, conflict) -> None:
        if not self._async_reads:
            return
        offset = index * size
        first, end = int(offset.min()), int(offset.max()) + size
        for low, high, agent, other, granules, _ in self._async_reads:
            if low >= end or high <= first:
                continue
            hit = np.flatnonzero((offset < high) & (offset + size > low))
            if granules is not None and len(hit):
                hit = hit[np.isin(offset[hit] >> 4, granules)]
            if len(hit):
                stamp = async_stamp(agent)
                late = clocks.limits(lanes[hit], np.full((len(hit), 1), agent))[:, 0] < stamp
                if late.any():
                    conflict(Kind.RACE, hit[late], f"writes what {self._who(agent)} may still read", other)

    def _who(self, agent: int) -> str:
        if agent == HOST:
            return "the host"
        return "an asynchronous operation" if self.clocks.asynchronous[agent] else "another thread"

    # Asynchronous operations access a run of bytes, in the async proxy. `conflict` is called with no rows.

    def async_read(self, agent: int, knowledge: Knowledge, low: int, high: int, at: int, conflict: Conflict) -> bool:
        """Checks and records; False when a byte lies in a red zone (then nothing is recorded)."""
        stamps = self.written[low:high]
        if len(stamps) < high - low or stamps.min(initial=1) < 0:
            return False
        if not stamps.all():
            conflict(Kind.UNINITIALISED_MEMORY, _NO_ROWS, "reads bytes never written", -1)
        self._async_against_writes(agent, knowledge, lambda i: low + i, stamps, conflict, "reads")
        self._async_against_atomics(knowledge, low, high, conflict, "reads")
        self._async_reads.append(_AsyncRead(low, high, agent, at, None, -1))
        return True

    def async_read_granules(
        self, agent: int, knowledge: Knowledge, granules: np.ndarray, at: int, chain: int, conflict: Conflict
    ) -> bool:
        """The same for scattered bytes: sorted distinct granules of 16. Readers of one chain complete in order, and
        nobody waits for a later one only."""
        stamps = self._by_size[16][granules].ravel()
        if stamps.min(initial=1) < 0:
            return False
        if not stamps.all():
            conflict(Kind.UNINITIALISED_MEMORY, _NO_ROWS, "reads bytes never written", -1)
        where = lambda i: 16 * int(granules[i >> 4]) + (i & 15)  # noqa: E731
        self._async_against_writes(agent, knowledge, where, stamps, conflict, "reads")
        low, high = 16 * int(granules[0]), 16 * int(granules[-1]) + 16
        if self._atomics.unordered_range(knowledge, low, high, fenced=True) is not None:  # maybe between the granules
            for granule in granules.tolist():
                if not self._async_against_atomics(knowledge, 16 * granule, 16 * granule + 16, conflict, "reads"):
                    break
        new = _AsyncRead(low, high, agent, at, granules, chain)
        self._async_reads = [old for old in self._async_reads if not new.replaces(old)]
        self._async_reads.append(new)
        return True

    def async_write(self, agent: int, knowledge: Knowledge, low: int, high: int, at: int, conflict: Conflict) -> bool:
        stamps = self.written[low:high]
        if len(stamps) < high - low or stamps.min(initial=1) < 0:
            return False
        self._async_against_writes(agent, knowledge, lambda i: low + i, stamps, conflict, "writes")
        self._async_against_atomics(knowledge, low, high, conflict, "writes")
        self._atomics.forget_range(low, high)
        for accesses in (self._reads, self._strong_reads):
            if (other := accesses.unordered_range(knowledge, low, high)) is not None:
                conflict(Kind.RACE, _NO_ROWS, "writes what a thread reads, unordered", other)
            accesses.forget_range(low, high)
        kept = []
        for entry in self._async_reads:
            start, end, reader, other, granules, _ = entry
            overlaps = start < high and end > low
            if overlaps and granules is not None:
                overlaps = bool(((granules >= low >> 4) & (granules <= (high - 1) >> 4)).any())
            if reader != agent and overlaps:
                knowledge.widen(reader + 1)
                if knowledge.seen[reader] < async_stamp(reader):
                    conflict(Kind.RACE, _NO_ROWS, f"writes what {self._who(reader)} may still read", other)
                elif low <= start and end <= high:
                    continue
            kept.append(entry)
        self._async_reads = kept
        self._dirty[low >> _PAGE_SHIFT : (high >> _PAGE_SHIFT) + 1] = True
        self.written[low:high] = async_stamp(agent)
        self._written_at[low >> 2 : -(-high // 4)] = at
        return True

    def _async_against_atomics(self, knowledge: Knowledge, low: int, high: int, conflict: Conflict, does: str) -> bool:
        """Whether all is well with the strong writes of threads."""
        if (other := self._atomics.unordered_range(knowledge, low, high)) is not None:
            conflict(Kind.RACE, _NO_ROWS, f"{does} what a thread changes atomically, unordered", other)
        elif (other := self._atomics.unordered_range(knowledge, low, high, fenced=True)) is not None:
            conflict(Kind.PROXY, _NO_ROWS, f"{does} {_UNFENCED}", other)
        return other is None

    def _async_against_writes(self, agent, knowledge, offset_of, stamps, conflict, does) -> None:
        agents = stamps & AGENT_MASK
        knowledge.widen(int(agents.max(initial=0)) + 1)
        late = (stamps > knowledge.seen[agents]) & (agents != agent)
        if late.any():
            byte = int(np.flatnonzero(late)[0])
            other = int(self._written_at[offset_of(byte) >> 2])
            conflict(Kind.RACE, _NO_ROWS, f"{does} bytes that {self._who(int(agents[byte]))} wrote, unordered", other)
        generic = (agents > HOST) & (~self.clocks.asynchronous[agents] | self.clocks.generic[agents])
        unfenced = generic & (stamps > knowledge.fenced[agents]) & ~late
        if unfenced.any():
            byte = int(np.flatnonzero(unfenced)[0])
            other = int(self._written_at[offset_of(byte) >> 2])
            conflict(Kind.PROXY, _NO_ROWS, f"{does} {_UNFENCED}", other)


_UNFENCED = "through the async proxy what a thread (or its cp.async) wrote without fence.proxy.async"
_NO_ROWS = np.zeros(0, np.int64)
