"""What bounds a memory-bound kernel on a GPU: the rates of its parts against what one weight asks of each.

The rates are those of the data sheets and of the instruction throughput tables, at the sustained clock of an H100 SXM.
Nothing here is measured. A kernel that reaches its bound overlaps everything perfectly, so a bound is the least time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """Rates of one multiprocessor (SM) at `clock_ghz`."""

    name: str
    hbm_bytes: float  # a clock and SM
    multiprocessors: int = 132
    clock_ghz: float = 1.755

    @property
    def hbm_gb_per_second(self) -> float:
        return self.hbm_bytes * self.multiprocessors * self.clock_ghz


GPUS = {"H100": Gpu("H100", 14.5), "H200": Gpu("H200", 20.7)}

# Lane-operations an SM takes in a clock, by pipe. Instructions of pipes that aren't here are bound by the issue alone.
# ALU: LOP3 SHF PRMT IADD3 ISETP. FMA-heavy: IMAD IDP. FMA: FFMA and its like, on both halves. XU: POPC FLO MUFU.
PIPES = {"ALU": 64, "FMA-heavy": 64, "FMA": 128, "LSU": 32, "XU": 16}
ISSUE = 128  # four warp instructions, whatever their pipes
SHARED_WAVEFRONTS = 1  # of up to 128 bytes, a clock


def gpu_of(name: str) -> Gpu | None:
    """The GPU that a device calls itself ("NVIDIA H100 80GB HBM3" for one), or None where its rates aren't known.

    Only the SXM parts: those for PCIe have slower memory and fewer SMs under the same name.
    """
    words = name.split()
    if "PCIe" in words or "NVL" in words:
        return None
    return next((gpu for key, gpu in GPUS.items() if key in words), None)


@dataclass(frozen=True)
class Demand:
    """What a kernel asks of an SM for one weight."""

    hbm_bytes: float
    shared_wavefronts: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)  # SASS instructions of a lane, by pipe


@dataclass(frozen=True)
class Bound:
    """The least time for a weight, in clocks of one SM, and what takes it."""

    clocks: Mapping[str, float]  # by resource
    gpu: Gpu

    @property
    def limiter(self) -> str:
        return max(self.clocks, key=self.clocks.__getitem__)

    @property
    def clocks_per_weight(self) -> float:
        return max(self.clocks.values())

    @property
    def weights_per_clock(self) -> float:
        """A clock and SM."""
        return 1 / self.clocks_per_weight

    @property
    def bf16_gb_per_second(self) -> float:
        """Of the whole GPU, counting two bytes a weight."""
        return 2 * self.weights_per_clock * self.gpu.multiprocessors * self.gpu.clock_ghz

    @property
    def share_of_hbm(self) -> float:
        """Of the memory's rate: 1 where the memory is the limiter."""
        return self.clocks["HBM"] / self.clocks_per_weight

    def microseconds(self, weights: int) -> float:
        """The least time for so many weights, without launch, ramp-up and tail."""
        return weights * self.clocks_per_weight / (self.gpu.multiprocessors * self.gpu.clock_ghz * 1e3)

    def instructions_per_warp(self, operations: Mapping[str, float], warps: int) -> float:
        """A clock, so that `warps` of an SM reach the bound. One whose instructions wait for each other has ~0.2."""
        return sum(operations.values()) / LANES * self.weights_per_clock / warps


def bound(demand: Demand, gpu: Gpu) -> Bound:
    """The roofline of `demand` on `gpu`. Raises ValueError for a demand that isn't positive."""
    if not demand.hbm_bytes > 0:
        raise ValueError(f"hbm_bytes: {demand.hbm_bytes}, expected more than 0: every kernel reads its weights")
    clocks = {
        "HBM": demand.hbm_bytes / gpu.hbm_bytes,
        "shared memory": demand.shared_wavefronts / SHARED_WAVEFRONTS,
        "issue": sum(demand.operations.values()) / ISSUE,
    }
    clocks.update({pipe: demand.operations.get(pipe, 0.0) / rate for pipe, rate in PIPES.items()})
    return Bound(clocks, gpu)


# What an SM holds. A warp has its registers, in pieces of 256, from one of the SM's four parts; each CTA takes 1 KB of
# shared memory more than it asks for.
LANES, WARPS, CTAS, PARTS = 32, 64, 32, 4
REGISTERS, REGISTER_PIECE = 1 << 16, 256
SHARED_BYTES, SHARED_OF_CTA = 228 << 10, 1 << 10


def resident_warps(threads: int, registers: int, shared_bytes: int) -> int:
    """Of an SM, all its CTAs together; 0 where not even one fits."""
    warps = -(-threads // LANES)
    of_warp = -(-registers * LANES // REGISTER_PIECE) * REGISTER_PIECE
    by_registers = REGISTERS // PARTS // of_warp * PARTS
    ctas = min(CTAS, WARPS // warps, by_registers // warps, SHARED_BYTES // (shared_bytes + SHARED_OF_CTA))
    return ctas * warps


def budget(hbm_bytes: float, gpu: Gpu) -> dict[str, float]:
    """Lane-operations a weight may take, by pipe and in all ("issue"), before the memory is no longer the limiter."""
    clocks = hbm_bytes / gpu.hbm_bytes
    return {**{pipe: rate * clocks for pipe, rate in PIPES.items()}, "issue": ISSUE * clocks}
