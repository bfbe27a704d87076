"""What the interpreter has to say about a kernel: kinds of reports, their collection, and the exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .program import Instruction


class Kind(str, Enum):
    OUT_OF_BOUNDS = "out of bounds"
    MISALIGNED = "misaligned"
    READ_ONLY = "write to read-only memory"
    UNINITIALISED_REGISTER = "uninitialised register"
    UNINITIALISED_MEMORY = "uninitialised memory"
    RACE = "race"
    PROXY = "missing fence.proxy.async"
    DIVERGENCE = "divergence"
    MEMBER_MASK = "member mask"
    BARRIER = "barrier"
    MBARRIER = "mbarrier"
    BULK = "bulk copy"
    WGMMA = "wgmma"
    REGISTER_POOL = "setmaxnreg"
    DEPENDENT = "dependent launch"
    PENDING_AT_EXIT = "pending at exit"
    DEADLOCK = "deadlock"
    STEP_BUDGET = "step budget"
    TRAP = "trap"
    ASSERTION = "assertion"
    LAUNCH = "launch"

    __str__ = str.__str__


@dataclass
class Report:
    kind: Kind
    kernel: str
    instruction: Instruction | None
    where: str  # "CTA 0 warp 1 lanes 0-3"
    detail: str
    other: Instruction | None = None  # the earlier access of a race
    count: int = 1

    @property
    def file(self) -> str:
        return self.instruction.location.file if self.instruction else "?"

    @property
    def line(self) -> int:
        return self.instruction.location.line if self.instruction else 0

    def at(self, file: str, line: int) -> bool:
        """Whether this line is the report's, or one that it was inlined at."""
        return self.instruction is not None and (file, line) in self.instruction.location.frames

    def __str__(self) -> str:
        text = f"{self.kind}: {self.kernel}"
        if self.instruction:
            text += f" at {self.instruction.location}: {self.instruction.text}"
        text += f"\n    {self.where}: {self.detail}" if self.where else f"\n    {self.detail}"
        if self.other:
            text += f"\n    the other: {self.other.location}: {self.other.text}"
        return text + (f"\n    {self.count} times" if self.count > 1 else "")


class KernelReport(AssertionError):
    """A launch had reports. `reports` has each once, with a count."""

    def __init__(self, reports: list[Report]):
        self.reports = reports
        super().__init__("\n".join(str(report) for report in reports))

    def kinds(self) -> set[Kind]:
        return {report.kind for report in self.reports}


class Reports:
    """Of one launch. The same kind at the same instruction, with the same other one, is counted, not repeated."""

    def __init__(self, kernel: str):
        self._kernel = kernel
        self._reports: dict[tuple, Report] = {}

    def add(
        self,
        kind: Kind,
        instruction: Instruction | None,
        where: str,
        detail: str,
        other: Instruction | None = None,
    ) -> None:
        key = (kind, instruction and instruction.index, other and other.index)
        known = self._reports.get(key)
        if known:
            known.count += 1
        else:
            self._reports[key] = Report(kind, self._kernel, instruction, where, detail, other)

    def all(self) -> list[Report]:
        return list(self._reports.values())


def lanes_text(lanes) -> str:
    """Indices of lanes as "0-3, 7"."""
    runs: list[list[int]] = []
    for lane in sorted(int(lane) for lane in lanes):
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
