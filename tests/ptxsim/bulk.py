"""Asynchronous copies: what one moves, what its operands must satisfy, and the groups that are waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

GRANULE = 16  # bytes: sizes and addresses of bulk copies are multiples of it
MAX_BYTES = (1 << 20) - 1  # more can't be counted by an mbarrier


def problems_of_bulk_copy(destination: int, source: int, size: int) -> list[str]:
    """What is wrong with the operands of cp.async.bulk, in words; empty when nothing is."""
    found = [
        f"{name} {value:#x} is no multiple of {GRANULE}"
        for name, value in (("destination", destination), ("source", source), ("size", size))
        if value % GRANULE
    ]
    if size > MAX_BYTES:
        found.append(f"size {size}: at most {MAX_BYTES} bytes are allowed")
    return found


def problems_of_async_copy(destination: int, source: int, size: int, source_size: int) -> list[str]:
    """The same of cp.async: 4, 8 or 16 bytes, of which source_size are read and the others become zero."""
    found = [] if size in (4, 8, 16) else [f"size {size}: 4, 8 and 16 are allowed"]
    found += [
        f"{name} {value:#x} is no multiple of {size}"
        for name, value in (("destination", destination), ("source", source))
        if size and value % size
    ]
    if not 0 <= source_size <= size:
        found.append(f"source size {source_size}: 0 to {size} are allowed")
    return found


@dataclass(eq=False)
class Copy:
    """A copy that was issued. It reads its source at one moment and has written its destination at a later one."""

    agent: int = 0
    read: bool = False
    written: bool = False
    awaited: bool = False  # somebody waited until it had at least read its source


Operation = TypeVar("Operation")


@dataclass
class Groups(Generic[Operation]):
    """Operations of one thread or warp, committed in groups: of bulk stores, of wgmma."""

    open: list[Operation] = field(default_factory=list)
    committed: list[list[Operation]] = field(default_factory=list)

    def add(self, operation: Operation) -> None:
        self.open.append(operation)

    def commit(self) -> None:
        """An empty group counts too."""
        self.committed.append(self.open)
        self.open = []

    def older_than(self, newest: int) -> list[Operation]:
        """The operations that wait_group N waits for: all but those of the N newest groups, and of the open one."""
        keep = len(self.committed) - newest
        return [operation for group in self.committed[: max(keep, 0)] for operation in group]

    def retire(self, newest: int) -> list[Operation]:
        """Forgets the groups that were waited for, and returns their operations."""
        done = self.older_than(newest)
        del self.committed[: max(len(self.committed) - newest, 0)]
        return done

    def outstanding(self) -> list[Operation]:
        return [operation for group in [*self.committed, self.open] for operation in group]
