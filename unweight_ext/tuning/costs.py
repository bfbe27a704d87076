"""What one weight asks of a multiprocessor in the fused product, and what isn't known of a GPU and is assumed.

Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

TILED = ("raw", "huffman", "nibble")

# Lane-operations for a weight in the consumers' loop, waits and wgmma included, by pipe: counted in SASS of the kernels
# for 16 tokens (tests/test_tuning_costs.py). It has the test for patches, what they add is below.
OPERATIONS: Mapping[str, Mapping[str, float]] = {
    "raw": {"ALU": 0.23, "FMA-heavy": 0.0, "LSU": 0.16, "XU": 0.0, "other": 0.59},
    "huffman": {"ALU": 2.44, "FMA-heavy": 0.73, "LSU": 0.73, "XU": 0.23, "other": 0.89},
    "nibble": {"ALU": 1.41, "FMA-heavy": 0.08, "LSU": 0.16, "XU": 0.0, "other": 0.62},
}


@dataclass(frozen=True)
class Patches:
    """How many patches packed weights have: averages over the stages of all warps, 64 weights a lane."""

    MOST: ClassVar[int] = 31  # of a stage that isn't crowded: the warp's registers take them

    ksteps: float  # with patches, of 8, where the stage isn't crowded
    batches: float  # of 2: four k-steps
    patches: float
    crowded: float  # the share of stages with more of them
    crowded_patches: float  # in those, divided by all stages


# Of all-mpnet-base-v2, and what they add to the operations for a weight (bench/fused.py counts both).
RATES = {
    "huffman": Patches(4.511, 1.920, 6.740, 0.0008, 0.037),
    "nibble": Patches(0.320, 0.297, 0.330, 0.0, 0.0),
}
PATCHES: Mapping[str, Mapping[str, float]] = {
    "raw": {},
    "huffman": {"ALU": 0.75, "LSU": 0.11, "other": 0.28},
    "nibble": {"ALU": 0.19, "LSU": 0.01, "other": 0.05},
}
# Of the ring, by tokens: of linear_shared in csrc/cuda/linear/config.h.
SLOTS: Mapping[str, Mapping[int, int]] = {
    "raw": {8: 4, 16: 4, 32: 4, 64: 3, 128: 3, 256: 2},
    "huffman": {8: 3, 16: 3, 32: 3, 64: 3, 128: 3, 256: 2},
    "nibble": {8: 5, 16: 4, 32: 4, 64: 3, 128: 3, 256: 2},
}
HINTED_STAGES = 18  # that a hint asks for (prefetch.cuh)
# By tokens: pieces of a block that are read at once (gather.cuh).
PIECES_AT_ONCE: Mapping[int, int] = {8: 4, 16: 4, 32: 3, 64: 1, 128: 1, 256: 1}
COPY_OPERATIONS = 6  # of the copying warps, for 16 bytes of x: cp.async, its address, its test


def bits_per_weight(layout: str, segment_stages: int) -> float:
    """In memory, patches and stage headers included. A restart of huffman's streams costs 1.3 bits in a segment."""
    return {"raw": 16.02, "huffman": 10.7 + 1.3 / segment_stages, "nibble": 12.04}[layout]


@dataclass(frozen=True)
class Assumptions:
    """Neither in data sheets nor counted; the first things to measure. Microseconds, unless it says otherwise."""

    # From the end of one kernel to the first load of the next, which was launched early and waited for it. Ordinary
    # launches in a stream take about twice as long.
    dependent_launch: float = 0.5
    launch: float = 1.0
    # From the end of a CTA to the first load of the next kernel's on the same SM, which waited for its shared memory.
    cta_start: float = 0.2
    # From a load to its data. About 800 and 270 clocks have been reported for Hopper.
    hbm_latency: float = 0.5
    l2_latency: float = 0.16
    # Bytes a clock and SM that the L2 gives when all ask: 5.5 TB/s have been reported. And what one of a few gets.
    l2_bytes: float = 23.7
    l2_bytes_alone: float = 64.0
    # Whether x takes its part of what the L2 gives an SM, as weights do (of 64 tokens: half as much). Data sheets
    # say nothing of it, so it is no limit, and tables say what the L2 would have to give.
    x_takes_l2: bool = False
    # Of a CTA's code table: 256 rows of shared memory by 12 warps, with a barrier on each side.
    table_fill: float = 0.25
    # From the last sum to the end of a kernel: the stores reach the L2.
    store: float = 0.3
    # Of one wgmma, clocks of the SM's tensor cores, however few tokens it has: its A operand comes from registers.
    least_wgmma_clocks: float = 32.0
    # Whether the kernels ask the memory for their first stages before the kernel before them has ended.
    prefetches: bool = True
    # cuBLAS's share of the memory's rate at few tokens, the yardstick of the bars. At many it takes the tensor's rate.
    cublas_share_of_hbm: float = 0.88
    # Of cuBLAS's rate, at 128 tokens and more: what the design asks of these kernels, until it is measured.
    share_of_cublas: Mapping[str, float] | None = None

    def at_many_tokens(self, layout: str) -> float:
        return (self.share_of_cublas or {"raw": 0.85, "huffman": 0.85, "nibble": 0.97})[layout]


ASSUMED = Assumptions()
