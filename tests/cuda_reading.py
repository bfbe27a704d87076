"""Packed matrices on the simulated device, and the drivers that read them: for the tests of the reading kernels."""

from __future__ import annotations

import numpy as np
import torch
from native_module import native
from ptxsim.device import SimulatedDevice
from samples import LAYOUTS
from torch import Tensor

from unweight_ext import packed as packed_module

ANY = -1
NAN = 0x7FFF


class Loaded:
    """Packed matrices and a status word on a device of their own. Any report of the interpreter is an error."""

    def __init__(self, packed: Tensor, in_features: int, *, layout: int = ANY, seed: int = 0, rows: int | None = None):
        self.device = SimulatedDevice(seed=seed)
        self.matrices = packed.shape[0] if packed.dim() == 3 else 1
        self.rows, self.columns = rows or packed.shape[-2], in_features
        data = packed.contiguous().numpy().reshape(-1)
        address = self.device.tensor(data, "packed", readonly=True)
        self.matrix_bytes = data.size // self.matrices
        self.packed = native.PackedMatrices(
            address, self.matrix_bytes, self.rows, in_features, self.matrices, layout=layout
        )
        self.status = self.device.tensor(np.zeros(1, np.uint64), "status", readonly=False)

    def room(self, weights: int, name: str = "out") -> int:
        """Uninitialised, so what a kernel leaves out is seen when it is read back."""
        return self.device.allocate(2 * weights, name)

    def weights(self, address: int, *shape: int) -> Tensor:
        """What lies there, as bfloat16. Every byte must have been written."""
        raw = self.device.download(address, 2 * int(np.prod(shape)))
        return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(*shape)

    def raise_damage(self) -> None:
        native.raise_damage(self.device, self.packed, self.status)

    def damage(self) -> tuple[int, int, int]:
        """(flaw, matrix, place), flaw 0 if there is none."""
        return native.read_status(int.from_bytes(self.device.download(self.status, 8), "little"))

    def unpack(self) -> Tensor:
        """bfloat16 [N, K] or [E, N, K]. Raises native.Error on damage."""
        out = self.room(self.matrices * self.rows * self.columns)
        native.unpack(self.device, self.packed, out, self.status)
        self.raise_damage()
        stack = (self.matrices,) if self.matrices > 1 else ()
        return self.weights(out, *stack, self.rows, self.columns)

    def verify(self) -> None:
        """Raises native.Error on damage."""
        native.verify(self.device, self.packed, self.status)
        self.raise_damage()

    def embedding(self, ids: list[int], wide: bool = True) -> Tensor:
        """bfloat16 [ids, K]; look at `damage` for what is wrong."""
        numbers = np.array(ids, np.int64 if wide else np.int32)
        on_device = self.device.tensor(numbers, "ids", readonly=True)
        out = self.room(len(ids) * self.columns)
        native.embedding(self.device, self.packed, on_device, wide, len(ids), out, self.status)
        return self.weights(out, len(ids), self.columns)


def pack(weight: Tensor, layout: str, stacked: bool = False) -> Tensor:
    """On the CPU, and in the layout asked for."""
    packed = packed_module.pack_quietly(weight, layout, stacked=stacked)
    got = packed_module.info(packed).layout
    assert got == layout, f"a test's weight was packed as {got}, not as {layout}"
    return packed


def layout_number(layout: str) -> int:
    return LAYOUTS.index(layout)
