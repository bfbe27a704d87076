"""Who accessed a unit of memory last, when it may be many: readers, or threads that change it atomically."""

from __future__ import annotations

import numpy as np

from . import sparse
from .races import AGENT_MASK, Knowledge, ThreadClocks

_CROWD = -(1 << 24)  # several agents did; `& AGENT_MASK` gives NOBODY


class Accesses:
    """The latest access of each agent to each unit (a word, or a byte once something smaller was accessed), as far as
    it matters: an access that is ordered before a later one is forgotten."""

    def __init__(self, size: int):
        self._shift = 2
        self._last = sparse.zeros(size >> 2, np.int64)
        self._at = sparse.zeros(size >> 2, np.int32)  # the instruction, where _last says that there is one
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

    def unordered_range(self, knowledge: Knowledge, low: int, high: int, fenced: bool = False) -> int | None:
        """The same for an asynchronous access to bytes [low, high): the instruction of an unordered access; or, with
        fenced=True, of one that wasn't passed to the async proxy."""
        if not self.any:
            return None
        step = 1 << self._shift
        part = slice(low // step, -(-high // step))
        before = self._last[part]
        agents = before & AGENT_MASK
        knowledge.widen(int(agents.max(initial=0)) + 1)
        bad = before > (knowledge.fenced if fenced else knowledge.seen)[agents]
        crowded = np.flatnonzero(before < 0)
        if len(crowded):
            crowds = self._crowds[self._row_of[part][crowded], : len(self._agents)]
            knowledge.widen(int(self._agents.max(initial=0)) + 1)
            known = (knowledge.fenced if fenced else knowledge.seen)[self._agents]
            bad[crowded] |= (crowds > known[None, :]).any(axis=1)
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
