"""The rules for the registers of wgmma, of one warp: what may be in flight together, and what needs a wgmma.fence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .bulk import Groups


@dataclass(eq=False)
class Multiplication:
    """A wgmma.mma_async of one warp: it has its registers until its group has been waited for."""

    accumulators: tuple[int, ...]  # slots
    operands: tuple[int, ...]  # A, when it comes from registers
    shape: str
    instruction: Any = None
    product: Any = None  # of the warpgroup

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple({*self.accumulators, *self.operands})

    def __str__(self) -> str:
        where = getattr(self.instruction, "location", self.instruction)
        return f"the wgmma at {where}, before a wgmma.wait_group that covers it"


class WgmmaRegisters:
    """`accessed[slot]` is whether an instruction other than wgmma used a register since the last wgmma.fence: who
    executes the others keeps it, and forbids access to what `owner` names."""

    def __init__(self):
        self.groups: Groups[Multiplication] = Groups()
        self._owners: dict[int, list[Multiplication]] = {}
        self._fenced = False

    def owner(self, slot: int) -> Multiplication | None:
        """The newest one in flight that has the register."""
        owners = self._owners.get(slot)
        return owners[-1] if owners else None

    def fence(self) -> None:
        self._fenced = True

    def multiply(self, new: Multiplication, accessed: Sequence[int]) -> tuple[str, Any] | None:
        """A wgmma.mma_async starts. Returns what is wrong, if anything, and the earlier instruction that it is about.
        Chained accumulators of one shape need no fence and no wait."""
        problem = self._problem(new, accessed)
        self.groups.add(new)
        for slot in new.slots:
            self._owners.setdefault(slot, []).append(new)
        return problem

    def _problem(self, new: Multiplication, accessed: Sequence[int]) -> tuple[str, Any] | None:
        if not self._fenced:
            return "no wgmma.fence before the first wgmma.mma_async", None
        if any(accessed[slot] for slot in new.slots):
            return "a register of it was accessed since the last wgmma.fence", None
        for slot in new.accumulators:
            for owner in self._owners.get(slot, ()):
                if owner.accumulators != new.accumulators or owner.shape != new.shape:
                    text = "an accumulator belongs to a wgmma in flight that is no chain of the same shape"
                    return text, owner.instruction
        for slot in new.operands:
            for owner in self._owners.get(slot, ()):
                if slot in owner.accumulators:
                    return "A is the accumulator of a wgmma in flight", owner.instruction
        return None

    def commit(self) -> None:
        self.groups.commit()

    def wait(self, newest: int) -> list[Multiplication]:
        """wait_group: all but the newest groups are complete. Returns their multiplications."""
        done = self.groups.retire(newest)
        for finished in done:
            for slot in finished.slots:
                owners = self._owners[slot]
                owners.remove(finished)
                if not owners:
                    del self._owners[slot]
        return done
