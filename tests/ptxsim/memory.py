"""Memory: global tensors, the shared memory of a CTA, and address windows.

A region is one run of bytes with a shadow. Global regions lie far apart, so that an address past a tensor's end belongs
to nothing; static shared variables have red zones between them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from . import sparse
from .checks import Kind
from .dependent import EarlierLaunch
from .program import Kernel
from .races import RED_ZONE, Clocks, Knowledge
from .shadow import Shadow

# Generic addresses of the other spaces. Below SHARED_WINDOW lies global memory.
SHARED_WINDOW = 1 << 46
LOCAL_WINDOW = 1 << 47
PARAM_WINDOW = LOCAL_WINDOW + (1 << 46)
WINDOW_BYTES = 1 << 32
_GLOBAL_START = 1 << 33  # a pointer cut to 32 bits belongs to nothing
_GAP = 1 << 16
SHARED_START = 1024  # the system has the first KB of a CTA's shared memory
_RED_ZONE = 64
_POISON = 0xA5
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


@dataclass(frozen=True)
class Allocation:
    low: int  # offsets in the region
    high: int
    name: str


class Region:
    """Bytes [base, base + size). Reads and writes by warps are vectors over the lanes that take part."""

    def __init__(
        self, name: str, base: int, size: int, clocks: Clocks, readonly: bool = False, data: np.ndarray | None = None
    ):
        self.name = name
        self.base = base
        self.size = size
        self.readonly = readonly
        self.constant = False  # of a module: no launch writes it
        self.earlier: EarlierLaunch | None = None  # may still be writing here
        padded = -(-size // 16) * 16 + 16
        self.data = sparse.filled(padded, _POISON) if data is None else data
        self.shadow: Shadow | None = None
        if not readonly:
            self.shadow = Shadow(padded, clocks)
            self.shadow.set_red_zone(size, padded)
        self.allocations = [Allocation(0, size, name)]
        self._base = np.uint64(base)
        self._span = 1 << max(size - 1, 1).bit_length()
        self._words: dict[tuple[int, int], np.ndarray] = {}

    def words(self, width: int, count: int) -> np.ndarray:
        """The data as [n, count] values of `width` bytes."""
        key = (width, count)
        if key not in self._words:
            self._words[key] = self.data.view(_UNSIGNED[width]).reshape(-1, count)
        return self._words[key]

    def describe(self, offset: int) -> str:
        """An offset in words: which allocation it lies in or next to."""
        near = min(self.allocations, key=lambda a: 0 if a.low <= offset < a.high else min(
            abs(offset - a.low), abs(offset - a.high)
        ))  # fmt: skip
        relative = offset - near.low
        return f"byte {relative} of {near.name} ({near.high - near.low} bytes)"

    def set_bytes(self, offset: int, content: np.ndarray) -> None:
        """By the host, between launches."""
        self.data[offset : offset + len(content)] = content
        if self.shadow:
            self.shadow.set_initialised(offset, offset + len(content))

    def first_unwritten(self, low: int, high: int) -> int | None:
        """The first byte of a range that nobody has written."""
        if self.shadow is None or self.shadow.written[low:high].all():
            return None
        return low + int(np.flatnonzero(self.shadow.written[low:high] == 0)[0])

    def locate(self, warp, lanes: np.ndarray, address: np.ndarray, size: int, write: bool):
        """Addresses of one access -> (rows that are good or None for all, index in units of size). Reports the bad."""
        offset = address - self._base
        together = int(np.bitwise_or.reduce(offset))
        if not together & (size - 1) and together < self._span:
            index = (offset >> np.uint64(_SHIFT[size])).view(np.int64)
            if together + size <= self.size or int(index.max()) * size + size <= self.size:
                return None, index
        return self._sort_out(warp, lanes, offset.view(np.int64), size, write)

    def _sort_out(self, warp, lanes: np.ndarray, offset: np.ndarray, size: int, write: bool):
        outside = (offset < 0) | (offset > self.size - size)
        if self.shadow:
            inside = np.flatnonzero(~outside)
            ends = self.shadow.written[[offset[inside], offset[inside] + size - 1]]
            outside[inside] = (ends == RED_ZONE).any(axis=0)
        if outside.any():
            rows = np.flatnonzero(outside)
            verb = "writes" if write else "reads"
            detail = f"{verb} {size} bytes at {self.describe(int(offset[rows[0]]))}"
            warp.report(Kind.OUT_OF_BOUNDS, detail, lanes[rows])
        crooked = ~outside & (offset % size != 0)
        if crooked.any():
            rows = np.flatnonzero(crooked)
            first = int(offset[rows[0]])
            detail = f"address {self.base + first:#x} of {size} bytes, {self.describe(first)}"
            warp.report(Kind.MISALIGNED, detail, lanes[rows])
        good = np.flatnonzero(~outside & ~crooked)
        return good, offset[good] // size

    def _check(self, warp, lanes: np.ndarray, address: np.ndarray, size: int, check, write: bool):
        """(rows that may go on or None for all, index of each in units of size)"""
        good, index = self.locate(warp, lanes, address, size, write)
        if self.shadow is None or len(index) == 0:
            return good, index
        chosen = lanes if good is None else lanes[good]
        if check(warp.clocks, chosen, index, size, warp.current.index, warp.conflict(chosen)):
            return good, index
        # Some lane touched a red zone.
        good, index = self._sort_out(warp, lanes, (address - self._base).view(np.int64), size, write)
        if len(good):
            check(warp.clocks, lanes[good], index, size, warp.current.index, warp.conflict(lanes[good]))
        return good, index

    def _check_earlier(self, warp, lanes: np.ndarray, address: np.ndarray, verb: str) -> None:
        self.earlier.check(warp, lanes, f"{verb} {self.describe(int(address[0]) - self.base)}")

    def load(
        self,
        warp,
        lanes: np.ndarray,
        address: np.ndarray,
        width: int,
        count: int,
        strong: bool,
        coherent: bool = True,
    ) -> np.ndarray:
        """[lanes, count] values. What can't be read is reported and poison. coherent=False: of ld.global.nc."""
        if self.earlier and not strong:
            self._check_earlier(warp, lanes, address, "reads")
        check = self.shadow and (self.shadow.strong_read if strong else self.shadow.read)
        good, index = self._check(warp, lanes, address, width * count, check, False)
        if self.shadow and not coherent and len(rows := self.shadow.written_now(index, width * count)):
            chosen = lanes if good is None else lanes[good]
            detail = "reads through the non-coherent cache (nc) what this launch writes"
            warp.report(Kind.RACE, detail, chosen[rows])
        if good is None:
            return self.words(width, count)[index]
        result = np.full((len(lanes), count), _POISON, _UNSIGNED[width])
        result[good] = self.words(width, count)[index]
        return result

    def store(self, warp, lanes: np.ndarray, address: np.ndarray, values: np.ndarray, width: int, strong: bool) -> None:
        """values: [lanes, count], of `width` bytes each. Lanes that may not write are reported and left out."""
        if self.earlier:
            self._check_earlier(warp, lanes, address, "writes")
        if self.shadow is None:
            warp.report(Kind.READ_ONLY, f"writes {self.describe(int(address[0]) - self.base)}", lanes)
            return
        count = values.shape[1]
        check = self.shadow.atomic_store if strong else self.shadow.write
        good, index = self._check(warp, lanes, address, width * count, check, True)
        if good is not None:
            lanes, values = lanes[good], values[good]
        words = self.words(width, count)
        words[index] = values
        lost = words[index] != values
        if not strong and lost.any():
            lost = lost.any(axis=1)
            where = self.describe(int(index[lost][0]) * width * count)
            warp.report(Kind.RACE, f"lanes write different values to {where}", lanes[lost])

    def atomic_index(self, warp, lanes: np.ndarray, address: np.ndarray, size: int):
        """Checks an atomic access. Returns (rows that may go on, index of each in units of size)."""
        if self.earlier:
            self._check_earlier(warp, lanes, address, "changes")
        if self.shadow is None:
            warp.report(Kind.READ_ONLY, f"changes {self.describe(int(address[0]) - self.base)}", lanes)
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        good, index = self._check(warp, lanes, address, size, self.shadow.atomic, True)
        return np.arange(len(lanes)) if good is None else good, index

    # Asynchronous operations: runs of bytes, given by address. They return None or False after an out-of-bounds report.

    def async_read(self, access: AsyncAccess, address: int, size: int) -> np.ndarray | None:
        low = address - self.base
        if low < 0 or low + size > self.size:
            access.report(Kind.OUT_OF_BOUNDS, f"reads {size} bytes at {self.describe(low)}")
            return None
        if self.earlier:
            self.earlier.check_async(access, f"reads {self.describe(low)}")
        if self.shadow is not None and not self.shadow.async_read(
            access.agent, access.knowledge, low, low + size, access.index, access.conflict
        ):
            access.report(Kind.OUT_OF_BOUNDS, f"reads {size} bytes at {self.describe(low)}")
            return None
        return self.data[low : low + size]

    def async_read_granules(self, access: AsyncAccess, granules: np.ndarray, chain: int) -> bool:
        """Checks and records a read of 16-byte granules, given by their sorted addresses / 16, in shared memory."""
        low, high = int(granules[0]) << 4, int(granules[-1] + 1) << 4
        if (
            low < 0
            or high > self.size
            or not self.shadow.async_read_granules(
                access.agent, access.knowledge, granules, access.index, chain, access.conflict
            )
        ):
            access.report(Kind.OUT_OF_BOUNDS, f"reads bytes from {self.describe(low)} to {self.describe(high - 1)}")
            return False
        return True

    def async_write(self, access: AsyncAccess, address: int, data: np.ndarray) -> bool:
        low, size = address - self.base, len(data)
        if low < 0 or low + size > self.size:
            access.report(Kind.OUT_OF_BOUNDS, f"writes {size} bytes at {self.describe(low)}")
            return False
        if self.earlier:
            self.earlier.check_async(access, f"writes {self.describe(low)}")
        if self.shadow is None:
            access.report(Kind.READ_ONLY, f"writes {self.describe(low)}")
            return False
        if not self.shadow.async_write(access.agent, access.knowledge, low, low + size, access.index, access.conflict):
            access.report(Kind.OUT_OF_BOUNDS, f"writes {size} bytes at {self.describe(low)}")
            return False
        self.data[low : low + size] = data
        return True


class AsyncAccess:
    """Who an asynchronous operation is: its agent, what it knows, and the instruction (and warp) that started it."""

    def __init__(self, warp, agent: int, knowledge: Knowledge):
        self.agent = agent
        self.knowledge = knowledge
        self.warp = warp
        self.instruction = warp.current
        self.index = warp.current.index

    def report(self, kind: Kind, detail: str, other: int = -1) -> None:
        self.warp.report(kind, detail, None, other, self.instruction)

    def conflict(self, kind: Kind, rows: np.ndarray, detail: str, other: int) -> None:
        self.report(kind, detail, other)


class SharedMemory(Region):
    """Of one CTA: static variables with red zones between them, then the dynamic part. Addresses start at 0."""

    def __init__(self, layout: SharedLayout, clocks: Clocks):
        super().__init__("shared memory", 0, layout.bytes, clocks)
        self.allocations = layout.allocations or [Allocation(0, 0, "no shared memory")]
        end = 0
        for allocation in sorted(layout.allocations, key=lambda a: a.low):
            self.shadow.set_red_zone(end, allocation.low)
            end = allocation.high
        self.shadow.set_red_zone(end, layout.bytes)


class SharedLayout:
    """Where a kernel's shared variables lie. Unlike on a GPU there is room between static ones."""

    def __init__(self, kernel: Kernel, dynamic_bytes: int):
        self.allocations: list[Allocation] = []
        self.addresses: dict[str, int] = {}  # by scoped name
        end = SHARED_START
        for name, variable in kernel.variables.items():
            if variable.space == "shared":
                end = -(-end // max(variable.align, 16)) * max(variable.align, 16)
                self.addresses[name] = end
                self.allocations.append(Allocation(end, end + variable.bytes, name.split(".")[-1]))
                end += variable.bytes + _RED_ZONE
        # As aligned as the hardware makes it, and no more, when the kernel asks for little.
        align = max(kernel.dynamic_align, 16)
        self.dynamic = -(-end // align) * align if self.allocations else SHARED_START
        if dynamic_bytes:
            self.allocations.append(Allocation(self.dynamic, self.dynamic + dynamic_bytes, "dynamic shared memory"))
            end = self.dynamic + dynamic_bytes
        self.bytes = -(-end // 16) * 16 + _RED_ZONE
        self.used_bytes = sum(a.high - a.low for a in self.allocations)


class GlobalMemory:
    """Named tensors, far apart."""

    def __init__(self):
        self.clocks = Clocks()
        self._regions: list[Region] = []
        self._bases: list[int] = []
        self._next = _GLOBAL_START

    def allocate(self, content: np.ndarray | int, name: str, readonly: bool = False) -> Region:
        """A region of so many bytes of unknown content, or with an array's bytes."""
        if readonly and isinstance(content, int):
            raise ValueError(f"{name}: readonly memory needs its content")
        size = content if isinstance(content, int) else content.nbytes
        region = self._add(size, name, readonly)
        if not isinstance(content, int):
            region.data[:size] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
            if region.shadow:
                region.shadow.set_initialised(0, size)
        return region

    def adopt(self, content: np.ndarray, name: str) -> Region:
        """The array itself (uint8, a multiple of 16) as a readonly region: for contents too large to copy."""
        if content.dtype != np.uint8 or content.ndim != 1 or content.size % 16 or not content.flags.c_contiguous:
            raise ValueError(
                f"{name}: expected contiguous uint8, a multiple of 16, got {content.dtype} {content.shape}"
            )
        return self._add(content.size, name, True, content)

    def _add(self, size: int, name: str, readonly: bool, data: np.ndarray | None = None) -> Region:
        # 256-byte aligned, and no better: what needs more must not work by luck.
        region = Region(name, self._next + 256, size, self.clocks, readonly, data)
        self._next = -(-(region.base + size + _GAP) // 1024) * 1024
        self._regions.append(region)
        self._bases.append(region.base)
        return region

    def start(self, clocks: Clocks, earlier: EarlierLaunch | None = None) -> None:
        """A launch begins. `earlier`: the one before it may not be complete."""
        self.clocks = clocks
        for region in self._regions:
            region.earlier = None if region.constant else earlier
            if region.shadow:
                region.shadow.start(clocks)

    def find(self, address: int) -> Region | None:
        """The region an address lies in."""
        i = bisect.bisect_right(self._bases, address) - 1
        if i >= 0 and address < self._bases[i] + self._regions[i].size:
            return self._regions[i]
        return None

    def nearest(self, address: int) -> Region | None:
        """The region whose end an address may have run over, for reports; one on the GPU's first page is a null
        pointer, and near nothing."""
        i = bisect.bisect_right(self._bases, address) - 1
        candidates = self._regions[max(i, 0) : i + 2]
        near = min(candidates, key=lambda r: min(abs(address - r.base), abs(address - r.base - r.size)), default=None)
        if near is None or min(abs(address - near.base), abs(address - near.base - near.size)) > 1 << 32:
            return None
        return near
