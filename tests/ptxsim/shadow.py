"""What is known of each byte of a memory region: who wrote it last, who read it since, who changed it atomically."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .checks import Kind
from .races import AGENT_MASK, HOST, HOST_STAMP, RED_ZONE, Clocks, Knowledge, ThreadClocks, async_stamp

_CROWD = -(1 << 24)  # several agents read it; `& AGENT_MASK` gives NOBODY

# conflict(kind, rows, detail, other): rows are those of the access, other an instruction's index or -1
Conflict = Callable[[Kind, np.ndarray, str, int], None]


class Accesses:
    """The latest access of each agent to each unit (a word, or a byte once something smaller was accessed), as far as
    it matters: an access that is ordered before a later one is forgotten."""

    def __init__(self, size: int):
        self._shift = 2
        self._last = np.zeros(size >> 2, np.int64)
        self._at = np.zeros(size >> 2, np.int32)  # the instruction, where _last says that there is one
        self._views: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._row_of: np.ndarray | None = None  # of units with several agents: their row of _crowds
        self._crowds = np.zeros((0, 0), np.int64)  # (rows, agents)
        self._rows = 0
        self._column_of = np.full(0, -1, np.int64)  # agent -> column
        self._agents = np.zeros(0, np.int64)  # column -> agent
        self.any = False

    def _view(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        if size < 1 << self._shift:
            self._refine()
        if size not in self._views:
            units = size >> self._shift
            self._views[size] = self._last.reshape(-1, units), self._at.reshape(-1, units)
        return self._views[size]

    def _refine(self) -> None:
        """Words become bytes."""
        self._last = np.repeat(self._last, 4)
        self._at = np.repeat(self._at, 4)
        if self._row_of is not None:
            # Each byte gets its own copy of the row.
            crowded = np.flatnonzero(self._row_of >= 0)
            rows = self._row_of[crowded]
            self._row_of = np.full(len(self._last), -1, np.int64)
            self._crowds = np.repeat(self._crowds[rows], 4, axis=0)
            self._rows = len(self._crowds)
            self._row_of[(crowded[:, None] * 4 + np.arange(4)).ravel()] = np.arange(self._rows)
        self._shift = 0
        self._views.clear()

    def record(self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int) -> None:
        """Lanes access [index·size, (index+1)·size)."""
        last, where = self._view(size)
        stamps = clocks.stamps[lanes][:, None]
        if self.any:
            before = last[index]
            if before.any():
                if before.max() < 0:
                    where[index] = at
                    self._note(self._crowd_rows(index, size), clocks.agents[lanes][:, None], stamps)
                    return
                agents = before & AGENT_MASK
                free = (before <= clocks.limits(lanes, agents)) | (agents == clocks.agents[lanes][:, None])
                free &= before >= 0
                if not free.all():
                    keep = free.all(axis=1)
                    self._make_crowd(clocks, lanes[~keep], index[~keep], size, at)
                    if not keep.any():
                        return
                    lanes, index, stamps = lanes[keep], index[keep], stamps[keep]
        self.any = True
        last[index] = stamps
        where[index] = at
        lost = last[index] != stamps
        if lost.any():
            lost = lost.any(axis=1)
            self._make_crowd(clocks, lanes[lost], index[lost], size, at)

    def _crowd_rows(self, index: np.ndarray, size: int) -> np.ndarray:
        return self._row_of.reshape(-1, size >> self._shift)[index]

    def _make_crowd(self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int) -> None:
        """Several agents have all units of these accesses, from now on."""
        if self._row_of is None:
            self._row_of = np.full(len(self._last), -1, np.int64)
        units = index[:, None] * (size >> self._shift) + np.arange(size >> self._shift)
        rows = self._row_of[units]
        if rows.min() < 0:
            fresh = np.unique(units[rows < 0])
            self._grow(self._rows + len(fresh), 0)
            self._row_of[fresh] = np.arange(self._rows, self._rows + len(fresh))
            self._rows += len(fresh)
            rows = self._row_of[units]
        # Who had a unit to itself joins as well.
        before = self._last[units]
        alone = before > 0
        if alone.any():
            self._note(rows[alone], before[alone] & AGENT_MASK, before[alone])
        self._last[units] = _CROWD
        self._at[units] = at
        self._note(rows, clocks.agents[lanes][:, None], clocks.stamps[lanes][:, None])

    def _note(self, rows: np.ndarray, agents: np.ndarray, stamps: np.ndarray) -> None:
        most = int(agents.max())
        if most >= len(self._column_of):
            more = np.full(most + 256 - len(self._column_of), -1, np.int64)
            self._column_of = np.concatenate([self._column_of, more])
        columns = self._column_of[agents]
        if columns.min() < 0:
            new = np.unique(agents[columns < 0])
            self._column_of[new] = np.arange(len(self._agents), len(self._agents) + len(new))
            self._agents = np.concatenate([self._agents, new])
            columns = self._column_of[agents]
            self._grow(0, len(self._agents))
        self._crowds[rows, columns] = stamps

    def _grow(self, rows: int, columns: int) -> None:
        have_rows, have_columns = self._crowds.shape
        if rows > have_rows or columns > have_columns:
            more_rows = max(have_rows, 2 * rows if rows > have_rows else 0)
            more_columns = max(have_columns, 2 * columns if columns > have_columns else 0, 32)
            larger = np.zeros((more_rows, more_columns), np.int64)
            larger[:have_rows, :have_columns] = self._crowds
            self._crowds = larger

    def unordered(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int
    ) -> tuple[np.ndarray, int] | None:
        """Rows of this access that aren't ordered after an access recorded by another agent, and where that was."""
        if not self.any:
            return None
        last, where = self._view(size)
        before = last[index]
        if not before.any():
            return None
        agents = before & AGENT_MASK
        bad = (before > clocks.limits(lanes, agents)) & (agents != clocks.agents[lanes][:, None])
        crowded = before < 0
        if crowded.any():
            row, unit = np.nonzero(crowded)
            crowds = self._crowds[self._row_of[index[row] * (size >> self._shift) + unit], : len(self._agents)]
            columns = np.broadcast_to(self._agents, crowds.shape)
            late = (crowds > clocks.limits(lanes[row], columns)) & (columns != clocks.agents[lanes[row]][:, None])
            bad[row, unit] |= late.any(axis=1)
        if not bad.any():
            return None
        return np.flatnonzero(bad.any(axis=1)), int(where[index][bad][0])

    def unordered_range(self, knowledge: Knowledge, low: int, high: int) -> int | None:
        """The same for an asynchronous access to bytes [low, high): the instruction of an unordered access."""
        if not self.any:
            return None
        step = 1 << self._shift
        part = slice(low // step, -(-high // step))
        before = self._last[part]
        agents = before & AGENT_MASK
        knowledge.widen(int(agents.max(initial=0)) + 1)
        bad = before > knowledge.seen[agents]
        crowded = np.flatnonzero(before < 0)
        if len(crowded):
            crowds = self._crowds[self._row_of[part][crowded], : len(self._agents)]
            knowledge.widen(int(self._agents.max(initial=0)) + 1)
            bad[crowded] |= (crowds > knowledge.seen[self._agents][None, :]).any(axis=1)
        return int(self._at[part][bad][0]) if bad.any() else None

    def forget(self, index: np.ndarray, size: int) -> None:
        if not self.any:
            return
        last, _ = self._view(size)
        if self._row_of is not None:
            rows = self._row_of[(index[:, None] * (size >> self._shift) + np.arange(size >> self._shift)).ravel()]
            self._crowds[rows[rows >= 0]] = 0
        last[index] = 0

    def forget_range(self, low: int, high: int) -> None:
        if not self.any:
            return
        step = 1 << self._shift
        part = slice(-(-low // step), high // step)
        if self._row_of is not None:
            rows = self._row_of[part]
            self._crowds[rows[rows >= 0]] = 0
        self._last[part] = 0


class Shadow:
    """`size` is a multiple of 16. Bytes start as never written."""

    def __init__(self, size: int, clocks: Clocks):
        self.clocks = clocks
        self.size = size
        self.written = np.zeros(size, np.int64)  # stamps
        self._written_at = np.zeros(size >> 2, np.int32)  # instructions
        self._dirty = False
        self._by_size = {n: self.written.reshape(-1, n) for n in (1, 2, 4, 8, 16)}
        self._reads = Accesses(size)
        self._atomics = Accesses(size)
        # (low, high, agent, instruction, 16-byte granules that were read, or None for all of them)
        self._async_reads: list[tuple[int, int, int, int, np.ndarray | None]] = []

    def set_red_zone(self, low: int, high: int) -> None:
        """The bytes belong to nothing: touching them is out of bounds."""
        self.written[low:high] = RED_ZONE

    def set_initialised(self, low: int, high: int) -> None:
        """The host wrote the bytes."""
        self.written[low:high] = HOST_STAMP

    def start(self, clocks: Clocks) -> None:
        """A launch begins: all that was written before is ordered before it."""
        self.clocks = clocks
        if self._dirty:
            np.minimum(self.written, HOST_STAMP, out=self.written)
            self._dirty = False
        self._reads = Accesses(self.size)
        self._atomics = Accesses(self.size)
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
            (self._atomics, "writes what another thread changes atomically, unordered"),
        ):
            if accesses.any:
                if found := accesses.unordered(clocks, lanes, index, size):
                    conflict(Kind.RACE, found[0], detail, found[1])
                accesses.forget(index, size)
        self._against_async_reads(clocks, lanes, index, size, conflict)
        self._dirty = True
        view[index] = clocks.stamps[lanes][:, None]
        if size >= 4:
            self._written_at.reshape(-1, size >> 2)[index] = at
        else:
            self._written_at[(index * size) >> 2] = at
        return True

    def atomic(
        self, clocks: ThreadClocks, lanes: np.ndarray, index: np.ndarray, size: int, at: int, conflict: Conflict
    ) -> bool:
        """An atomic or otherwise strong access: these don't race among themselves."""
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

    def _report_unwritten(self, stamps: np.ndarray, conflict: Conflict) -> None:
        rows = np.flatnonzero((stamps == 0).any(axis=1))
        conflict(Kind.UNINITIALISED_MEMORY, rows, "reads bytes never written", -1)

    def _against_writes(self, clocks, lanes, index, size, stamps, conflict, does) -> None:
        agents = stamps & AGENT_MASK
        late = stamps > clocks.limits(lanes, agents)
        if not late.any():
            return
        late &= agents != clocks.agents[lanes][:, None]
        if late.any():
            rows = np.flatnonzero(late.any(axis=1))
            row, byte = (int(i[0]) for i in np.nonzero(late))
            other = int(self._written_at[(int(index[row]) * size + byte) >> 2])
            conflict(Kind.RACE, rows, f"{does} bytes that {self._who(int(agents[row, byte]))} wrote, unordered", other)

    def _against_async_reads(self, clocks, lanes, index, size, conflict) -> None:
        if not self._async_reads:
            return
        offset = index * size
        for low, high, agent, other, granules in self._async_reads:
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
        if (other := self._atomics.unordered_range(knowledge, low, high)) is not None:
            conflict(Kind.RACE, _NO_ROWS, "reads what a thread changes atomically, unordered", other)
        self._async_reads.append((low, high, agent, at, None))
        return True

    def async_read_granules(
        self, agent: int, knowledge: Knowledge, granules: np.ndarray, at: int, conflict: Conflict
    ) -> bool:
        """The same for scattered bytes: sorted distinct granules of 16."""
        stamps = self._by_size[16][granules].ravel()
        if stamps.min(initial=1) < 0:
            return False
        if not stamps.all():
            conflict(Kind.UNINITIALISED_MEMORY, _NO_ROWS, "reads bytes never written", -1)
        where = lambda i: 16 * int(granules[i >> 4]) + (i & 15)  # noqa: E731
        self._async_against_writes(agent, knowledge, where, stamps, conflict, "reads")
        low, high = 16 * int(granules[0]), 16 * int(granules[-1]) + 16
        if self._atomics.unordered_range(knowledge, low, high) is not None:  # maybe between the granules
            for granule in granules.tolist():
                if (other := self._atomics.unordered_range(knowledge, 16 * granule, 16 * granule + 16)) is not None:
                    conflict(Kind.RACE, _NO_ROWS, "reads what a thread changes atomically, unordered", other)
                    break
        self._async_reads.append((low, high, agent, at, granules))
        return True

    def async_write(self, agent: int, knowledge: Knowledge, low: int, high: int, at: int, conflict: Conflict) -> bool:
        stamps = self.written[low:high]
        if len(stamps) < high - low or stamps.min(initial=1) < 0:
            return False
        self._async_against_writes(agent, knowledge, lambda i: low + i, stamps, conflict, "writes")
        for accesses in (self._reads, self._atomics):
            if (other := accesses.unordered_range(knowledge, low, high)) is not None:
                conflict(Kind.RACE, _NO_ROWS, "writes what a thread reads, unordered", other)
            accesses.forget_range(low, high)
        kept = []
        for entry in self._async_reads:
            start, end, reader, other, granules = entry
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
        self._dirty = True
        self.written[low:high] = async_stamp(agent)
        self._written_at[low >> 2 : -(-high // 4)] = at
        return True

    def _async_against_writes(self, agent, knowledge, offset_of, stamps, conflict, does) -> None:
        agents = stamps & AGENT_MASK
        knowledge.widen(int(agents.max(initial=0)) + 1)
        late = (stamps > knowledge.seen[agents]) & (agents != agent)
        if late.any():
            byte = int(np.flatnonzero(late)[0])
            other = int(self._written_at[offset_of(byte) >> 2])
            conflict(Kind.RACE, _NO_ROWS, f"{does} bytes that {self._who(int(agents[byte]))} wrote, unordered", other)
        generic = (agents > HOST) & ~self.clocks.asynchronous[agents]
        unfenced = generic & (stamps > knowledge.fenced[agents]) & ~late
        if unfenced.any():
            byte = int(np.flatnonzero(unfenced)[0])
            other = int(self._written_at[offset_of(byte) >> 2])
            detail = f"{does} through the async proxy what a thread wrote without fence.proxy.async"
            conflict(Kind.PROXY, _NO_ROWS, detail, other)


_NO_ROWS = np.zeros(0, np.int64)
