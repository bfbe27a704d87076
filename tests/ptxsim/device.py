"""A GPU that tests/_native's drivers launch on: csrc/cuda/device.h, implemented by the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .compiler import CSRC, cuda_toolkit, find_kernel
from .launch import DEFAULT_STEP_BUDGET, SHARED_PER_CTA, Machine
from .memory import Region

LEAST_SHARED_PER_CTA = 99 * 1024  # of compute capability 8.6, 8.9 and 12.0


class SimulatedDevice:
    """Runs every launch plan at once, and raises KernelReport for whatever the interpreter finds.

    device = SimulatedDevice(seed=1)
    packed = device.tensor(array, "packed")
    out = device.allocate(nbytes, "out")
    native.unpack(device, …)
    device.read(out, np.uint16, (n, k))

    `architecture`: the code that it runs, which says what GPU it is. Of those before Hopper it is the smallest.
    """

    architecture = cuda_toolkit.HOPPER  # unless a device is made for another; tests for several set it

    def __init__(
        self,
        multiprocessors: int = 2,
        seed: int = 0,
        step_budget: int = DEFAULT_STEP_BUDGET,
        csrc: Path = CSRC,
        architecture: str | None = None,
    ):
        self.architecture = architecture or self.architecture
        hopper = self.architecture == cuda_toolkit.HOPPER
        self.machine = Machine(
            multiprocessors, seed, step_budget, shared_per_cta=SHARED_PER_CTA if hopper else LEAST_SHARED_PER_CTA
        )
        self._csrc = csrc
        self._noise = np.random.default_rng(seed)
        self.launched: list[str] = []  # names of kernels, in order

    # What device.h asks for.

    def multiprocessors(self) -> int:
        return self.machine.multiprocessors

    def allocate(self, nbytes: int, name: str) -> int:
        return self.machine.allocate(int(nbytes), name).base

    def allocate_any(self, nbytes: int, name: str) -> int:
        """Memory that may be read at once: any bytes are there."""
        return self.machine.allocate(self._noise.integers(0, 256, int(nbytes), np.uint8), name).base

    def clear(self, address: int, nbytes: int) -> None:
        self.upload(address, bytes(nbytes))

    def upload(self, address: int, data: bytes) -> None:
        if len(data):
            region, offset = self._find(address, len(data))
            region.set_bytes(offset, np.frombuffer(data, np.uint8))

    def download(self, address: int, nbytes: int) -> bytes:
        """Raises ValueError for bytes that nobody has written."""
        if nbytes == 0:
            return b""
        region, offset = self._find(address, nbytes)
        missing = region.first_unwritten(offset, offset + nbytes)
        if missing is not None:
            raise ValueError(f"download: {region.describe(missing)} was never written")
        return region.data[offset : offset + nbytes].tobytes()

    def launch(
        self,
        kernel: str,
        grid: int,
        block: int,
        shared_bytes: int,
        argument: bytes,
        programmatic: bool = False,
        ctas: Sequence[int] | None = None,
    ) -> None:
        self.launched.append(kernel)
        found = find_kernel(kernel, self._csrc, self.architecture)
        self.machine.launch(found, grid, block, shared_bytes, bytes(argument), programmatic=programmatic, ctas=ctas)

    # For tests.

    def run(self, plan, ctas: Sequence[int] | None = None) -> None:
        """A LaunchPlan, or only these CTAs of it."""
        self.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, plan.argument, plan.programmatic, ctas)

    def tensor(self, content, name: str, readonly: bool = True) -> int:
        """The address of an array's (or torch tensor's) bytes. Kernels may not write them unless readonly=False."""
        if not isinstance(content, np.ndarray):
            import torch

            content = content.contiguous().view(torch.uint8).numpy()
        return self.machine.allocate(content, name, readonly).base

    def read(self, address: int, dtype, shape) -> np.ndarray:
        """A copy of what lies there, as download gives it."""
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.download(address, count), dtype).reshape(shape)

    def _find(self, address: int, nbytes: int) -> tuple[Region, int]:
        region = self.machine.memory.find(address)
        if region is None or address + nbytes > region.base + region.size:
            where = region.describe(address - region.base) if region else "no tensor"
            raise ValueError(f"{nbytes} bytes at {address:#x}: out of bounds, {where}")
        return region, address - region.base
