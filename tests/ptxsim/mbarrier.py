"""An mbarrier object as a state machine: phases, pending arrivals, pending bytes (tx). It knows nothing of warps.

Whoever arrives hands something over (to the interpreter a clock, here any object); whoever sees a phase complete gets
what was handed over in that phase.
"""

from __future__ import annotations

from typing import Any

MAX_COUNT = (1 << 20) - 1


class MbarrierError(Exception):
    """Something the PTX ISA leaves undefined."""


class Mbarrier:
    """One object in shared memory, from init to inval."""

    def __init__(self, count: int):
        if not 1 <= count <= MAX_COUNT:
            raise MbarrierError(f"init with {count} arrivals: 1 to {MAX_COUNT} are allowed")
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self._arriving: list[Any] = []
        self.released: list[Any] = []  # handed over in the newest complete phase

    def __str__(self) -> str:
        return f"phase {self.phase} (parity {self.phase & 1}), pending {self.pending} of {self.expected}, tx {self.tx}"

    def expect_tx(self, size: int) -> None:
        self.tx += size
        if abs(self.tx) > MAX_COUNT:
            raise MbarrierError(f"tx-count {self.tx}: -{MAX_COUNT} to {MAX_COUNT} are allowed")

    def arrive(self, handed: Any = None, count: int = 1, complete: bool = True) -> int:
        """Returns the state before the arrival, for test_state. complete=False: .noComplete, which must not be last."""
        if count < 1:
            raise MbarrierError(f"arrival of {count}: at least 1 is allowed")
        if count > self.pending:
            raise MbarrierError(f"arrival of {count} with {self.pending} pending in phase {self.phase}: underflow")
        state = self.state
        self._arriving.append(handed)
        self.pending -= count
        if not complete and self.pending == 0 and self.tx == 0:
            raise MbarrierError("arrive.noComplete completed the phase")
        self._try_complete()
        return state

    def drop(self, handed: Any = None, count: int = 1) -> int:
        """arrive_drop: arrives, and takes no part in later phases."""
        if count > self.expected:
            raise MbarrierError(f"arrive_drop of {count} with {self.expected} expected")
        self.expected -= count
        return self.arrive(handed, count)

    def complete_tx(self, size: int, handed: Any = None) -> None:
        """An asynchronous operation has written this many bytes."""
        self.tx -= size
        if self.tx < -MAX_COUNT:
            raise MbarrierError(f"tx-count {self.tx}: -{MAX_COUNT} to {MAX_COUNT} are allowed")
        self._arriving.append(handed)
        self._try_complete()

    @property
    def state(self) -> int:
        """The opaque state word of arrive."""
        return self.phase << 32 | self.pending

    def test_parity(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: the newest one that is, or the one "before" the first."""
        return (self.phase & 1) != (parity & 1)

    def test_state(self, state: int) -> bool:
        """Whether the phase that `state` was taken in is complete."""
        return self.phase != state >> 32

    def _try_complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.released, self._arriving = self._arriving, []
