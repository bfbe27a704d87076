"""Rates of the GPUs that the kernels run on: of the data sheets and of the instruction throughput tables.

At the sustained clock of an H100 SXM. Nothing here is measured. Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def microseconds(self, clocks: float) -> float:
        return clocks / (1e3 * self.clock_ghz)


GPUS = {"H100": Gpu("H100", 14.5), "H200": Gpu("H200", 20.7)}

# Lane-operations an SM takes in a clock, by pipe. Instructions of pipes that aren't here are bound by the issue alone.
# ALU: LOP3 SHF PRMT IADD3 ISETP. FMA-heavy: IMAD IDP. FMA: FFMA and its like, on both halves. XU: POPC FLO MUFU.
PIPES = {"ALU": 64, "FMA-heavy": 64, "FMA": 128, "LSU": 32, "XU": 16}
ISSUE = 128  # four warp instructions, whatever their pipes
SHARED_WAVEFRONTS = 1  # of up to 128 bytes, a clock
TENSOR = 2048  # multiplications of two BF16 numbers a clock and SM


def gpu_of(name: str) -> Gpu | None:
    """The GPU that a device calls itself ("NVIDIA H100 80GB HBM3" for one), or None where its rates aren't known.

    Only the SXM parts: those for PCIe have slower memory and fewer SMs under the same name.
    """
    words = name.split()
    if "PCIe" in words or "NVL" in words:
        return None
    return next((gpu for key, gpu in GPUS.items() if key in words), None)
