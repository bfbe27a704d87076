"""Counts of what ran: instructions by opcode and by line, shared memory wavefronts, global sectors, bulk bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .program import Instruction

SECTOR = 32
_WAVEFRONT = 128
_CACHED_PATTERNS = 1 << 14


@dataclass
class SharedTraffic:
    accesses: int = 0  # by a warp
    wavefronts: int = 0
    least: int = 0  # what they would be without conflicts


@dataclass
class GlobalTraffic:
    accesses: int = 0
    sectors: int = 0  # of 32 bytes, requested from the L2
    used: int = 0  # distinct bytes in them


@dataclass
class Line:
    warp_instructions: int = 0
    thread_instructions: int = 0


class Counters:
    """Of all launches of a machine, until `clear`. Keys of lines are (file, line) of the innermost frame."""

    def __init__(self):
        self.clear()
        self._patterns: dict[tuple, tuple[int, int]] = {}

    def clear(self) -> None:
        self.opcodes: Counter[str] = Counter()  # warp instructions by full name
        self.kernels: Counter[str] = Counter()  # warp instructions by kernel
        self.warp_instructions = 0
        self.thread_instructions = 0
        self.lines: dict[tuple[str, int], Line] = {}
        self.shared: dict[tuple[str, int], SharedTraffic] = {}
        self.loads: dict[tuple[str, int], GlobalTraffic] = {}
        self.stores: dict[tuple[str, int], GlobalTraffic] = {}
        self.regions_read: Counter[str] = Counter()  # bytes by tensor: sectors of loads, and bulk copies
        self.regions_written: Counter[str] = Counter()
        self.bulk_loaded = 0  # bytes, global to shared
        self.bulk_stored = 0
        # (tensor, offset, bytes) of bulk copies from global memory, and of what was asked into the L2.
        self.bulk_sources: set[tuple[str, int, int]] = set()
        self.prefetched: set[tuple[str, int, int]] = set()

    def add_instructions(self, kernel: str, instructions: list[Instruction], warps: list[int], threads: list[int]):
        for instruction, warp_count, thread_count in zip(instructions, warps, threads, strict=True):
            if warp_count:
                self.opcodes[instruction.name] += warp_count
                self.kernels[kernel] += warp_count
                self.warp_instructions += warp_count
                self.thread_instructions += thread_count
                place = instruction.location.frames[0]
                line = self.lines.setdefault(place, Line())
                line.warp_instructions += warp_count
                line.thread_instructions += thread_count

    @property
    def wavefronts(self) -> int:
        return sum(traffic.wavefronts for traffic in self.shared.values())

    @property
    def least_wavefronts(self) -> int:
        return sum(traffic.least for traffic in self.shared.values())

    def memory(self, warp, region, address: np.ndarray, size: int, write: bool) -> None:
        """Lanes access `size` bytes each."""
        if region is warp.cta.shared:
            self.shared_access(warp.current, address, size)
        else:
            self._global_access(warp.current, region, address, size, write)

    def shared_access(self, instruction: Instruction, address: np.ndarray, size: int) -> None:
        """Addresses of the lanes that take part, each of `size` bytes (4 at least count)."""
        place = instruction.location.frames[0]
        traffic = self.shared.get(place)
        if traffic is None:
            traffic = self.shared[place] = SharedTraffic()
        # Conflicts don't depend on where the whole pattern lies, up to the word.
        key = (size, ((address >> np.uint64(2)) - (address[0] >> np.uint64(2))).tobytes())
        counts = self._counts_of(key, count_wavefronts, address, size)
        traffic.accesses += 1
        traffic.wavefronts += counts[0]
        traffic.least += counts[1]

    def _global_access(self, instruction: Instruction, region, address: np.ndarray, size: int, write: bool) -> None:
        place = instruction.location.frames[0]
        table = self.stores if write else self.loads
        traffic = table.get(place)
        if traffic is None:
            traffic = table[place] = GlobalTraffic()
        first = address[0] & np.uint64(~(SECTOR - 1) & (1 << 64) - 1)
        key = ("global", size, (address - first).tobytes())
        counts = self._counts_of(key, _count_sectors, address, size)
        traffic.accesses += 1
        traffic.sectors += counts[0]
        traffic.used += counts[1]
        (self.regions_written if write else self.regions_read)[region.name] += SECTOR * counts[0]

    def _counts_of(self, key: tuple, count: Callable, address: np.ndarray, size: int) -> tuple[int, int]:
        """count(address, size), kept by `key` for the same pattern of addresses elsewhere."""
        counts = self._patterns.get(key)
        if counts is None:
            counts = count(address, size)
            if len(self._patterns) < _CACHED_PATTERNS:
                self._patterns[key] = counts
        return counts

    def bulk(self, region, address: int, size: int, write: bool) -> None:
        """A bulk copy between global memory (`address` in `region`) and shared memory; write: to global memory."""
        if write:
            self.bulk_stored += size
            self.regions_written[region.name] += size
        else:
            self.bulk_loaded += size
            self.bulk_sources.add((region.name, address - region.base, size))
            self.regions_read[region.name] += size


def count_wavefronts(address: np.ndarray, size: int) -> tuple[int, int]:
    """(wavefronts, without conflicts) of one access to shared memory. A wavefront serves 128 bytes, in each of 32 banks
    one word; wider accesses go in phases of as many lanes as make 128 bytes."""
    words = max(size // 4, 1)
    lanes = LANES_OF_PHASE[words]
    total = least = 0
    for start in range(0, len(address), lanes):
        first = address[start : start + lanes].astype(np.int64) >> 2
        distinct = np.unique(first[:, None] + np.arange(words))
        total += int(np.bincount(distinct & 31).max())
        least += 1
    return total, least


LANES_OF_PHASE = {1: 32, 2: 16, 4: 8}


def _count_sectors(address: np.ndarray, size: int) -> tuple[int, int]:
    touched = np.unique(address.astype(np.int64)[:, None] + np.arange(size))
    return len(np.unique(touched // SECTOR)), len(touched)
