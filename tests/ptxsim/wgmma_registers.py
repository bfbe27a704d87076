"""Which registers of a warp belong to a wgmma that is in flight, and which were touched since the last wgmma.fence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bulk import Groups


@dataclass(eq=False)
class Multiplication:
    """A wgmma.mma_async of one warp: the registers it owns until its group has been waited for."""

    accumulators: tuple[int, ...]
    operands: tuple[int, ...]  # A, when it comes from registers
    shape: str
    instruction: Any = None
    agent: int = 0


class WgmmaRegisters:
    """Register rules of wgmma for one warp. Methods return what is wrong, in words with the instruction that owns the
    register: [(text, instruction)]."""

    def __init__(self):
        self.groups: Groups[Multiplication] = Groups()
        self._owners: dict[int, list[Multiplication]] = {}
        self._touched: set[int] = set()
        self._fenced = False

    def touch(self, slots: tuple[int, ...]) -> list[tuple[str, Any]]:
        """An instruction other than wgmma.mma_async reads or writes these registers."""
        self._touched.update(slots)
        if not self._owners:
            return []
        owned = [slot for slot in slots if slot in self._owners]
        text = "a register of a wgmma in flight is accessed before a wgmma.wait_group that covers it"
        return [(text, self._owners[slot][-1].instruction) for slot in owned[:1]]

    def fence(self) -> None:
        self._fenced = True
        self._touched.clear()

    def multiply(self, new: Multiplication) -> list[tuple[str, Any]]:
        """A wgmma.mma_async starts. Chained accumulators of one shape need no fence and no wait."""
        found: list[tuple[str, Any]] = []
        if not self._fenced:
            found.append(("no wgmma.fence before the first wgmma.mma_async", None))
        elif not self._touched.isdisjoint(new.accumulators + new.operands):
            found.append(("a register was accessed since the last wgmma.fence", None))
        for slot in new.accumulators:
            for owner in self._owners.get(slot, ()):
                if slot not in owner.accumulators or owner.shape != new.shape or owner.accumulators != new.accumulators:
                    text = "an accumulator belongs to a wgmma in flight that is no chain of the same shape"
                    found.append((text, owner.instruction))
        for slot in new.operands:
            for owner in self._owners.get(slot, ()):
                if slot in owner.accumulators:
                    found.append(("A is the accumulator of a wgmma in flight", owner.instruction))
        self.groups.add(new)
        for slot in {*new.accumulators, *new.operands}:
            self._owners.setdefault(slot, []).append(new)
        return found[:1]

    def commit(self) -> None:
        self.groups.commit()

    def wait(self, newest: int) -> list[Multiplication]:
        """wait_group: all but the newest groups are complete. Returns their multiplications."""
        done = self.groups.retire(newest)
        for finished in done:
            for slot in {*finished.accumulators, *finished.operands}:
                owners = self._owners[slot]
                owners.remove(finished)
                if not owners:
                    del self._owners[slot]
        return done
