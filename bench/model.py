"""What bounds a memory-bound kernel on a GPU: the rates of its parts against what one weight asks of each.

The rates are those of unweight_ext/tuning/rates.py. Nothing here is measured. A kernel that reaches its bound overlaps
everything perfectly, so a bound is the least time.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _load_rates() -> ModuleType:
    """By its path: the package would load its compiled part, which isn't there or is stale where a build failed."""
    path = Path(__file__).resolve().parent.parent / "unweight_ext" / "tuning" / "rates.py"
    spec = importlib.util.spec_from_file_location("bench.rates", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from unweight_ext.tuning.rates import GPUS, ISSUE, PIPES, SHARED_WAVEFRONTS, Gpu, gpu_of
else:
    _rates = _load_rates()
    Gpu, GPUS, gpu_of = _rates.Gpu, _rates.GPUS, _rates.gpu_of
    PIPES, ISSUE, SHARED_WAVEFRONTS = _rates.PIPES, _rates.ISSUE, _rates.SHARED_WAVEFRONTS


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
