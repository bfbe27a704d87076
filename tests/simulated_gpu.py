"""torch's CUDA dispatch with the PTX interpreter behind it: the extension's operators from a library of its own, with
tests/_simulated in the place of the CUDA runtime. simulated_cases.py is the program that runs on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch
from ptxsim.device import SimulatedDevice
from samples import LAYOUTS, weight

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Gpu:
    """What tests/_simulated/device.cpp calls, on a SimulatedDevice."""

    SIGNATURES = (
        ("error", CFUNCTYPE(c_char_p)),
        ("captures", CFUNCTYPE(c_int)),
        ("multiprocessors", CFUNCTYPE(c_int)),
        ("capability", CFUNCTYPE(c_int)),
        ("allocate", CFUNCTYPE(c_uint64, c_uint64, c_char_p)),
        ("clear", CFUNCTYPE(None, c_uint64, c_uint64)),
        ("upload", CFUNCTYPE(None, c_uint64, c_void_p, c_uint64)),
        ("download", CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)),
        ("copy", CFUNCTYPE(None, c_uint64, c_uint64, c_uint64)),
        ("launch", CFUNCTYPE(None, c_char_p, c_uint32, c_uint32, c_uint32, c_void_p, c_uint64, c_int)),
        ("tensor", CFUNCTYPE(c_uint64, c_void_p, c_uint64)),
        ("finish", CFUNCTYPE(None)),
    )

    def __init__(self, library: str) -> None:
        torch.ops.load_library(library)
        self.device = SimulatedDevice()
        self.captured = False
        self.capability = 90  # 86: 8.6
        self.failure: BaseException | None = None  # of a call from C++, which can't raise it
        self._tensors: dict[tuple[int, int], int] = {}  # (host address, bytes) -> address on the device
        self._callbacks = [kind(self._guarded(getattr(self, f"_{name}"))) for name, kind in self.SIGNATURES]
        table = (c_void_p * len(self._callbacks))(*(ctypes.cast(f, c_void_p).value for f in self._callbacks))
        ctypes.CDLL(library).unweight_simulate(table)

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        """An operator as it runs for CUDA tensors. Raises what the interpreter reported, else the operator's error."""
        self.failure = None
        try:
            return getattr(torch.ops.unweight, name).default.redispatch(CUDA, *arguments, **options)
        finally:
            if self.failure is not None:
                raise self.failure

    def _guarded(self, function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            try:
                return function(*arguments)
            except BaseException as failure:
                self.failure = self.failure or failure
                return 0

        return call

    def _error(self) -> bytes | None:
        return str(self.failure).encode() if self.failure else None

    def _captures(self) -> int:
        return int(self.captured)

    def _multiprocessors(self) -> int:
        return self.device.multiprocessors()

    def become(self, capability: int) -> None:
        """Another GPU, which runs the code that the build has for it."""
        self.capability = capability
        self.device = SimulatedDevice(architecture="sm_90a" if capability == 90 else "sm_80")

    def _capability(self) -> int:
        return self.capability

    def _allocate(self, nbytes: int, name: bytes) -> int:
        return self.device.allocate(nbytes, name.decode())

    def _clear(self, where: int, nbytes: int) -> None:
        self.device.clear(where, nbytes)

    def _upload(self, to: int, source: int, nbytes: int) -> None:
        self.device.upload(to, ctypes.string_at(source, nbytes))

    def _download(self, to: int, where: int, nbytes: int) -> None:
        ctypes.memmove(to, self.device.download(where, nbytes), nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self.device.upload(to, self.device.download(source, nbytes))

    def _launch(
        self, kernel: bytes, grid: int, block: int, shared: int, argument: int, nbytes: int, programmatic: int
    ) -> None:
        content = ctypes.string_at(argument, nbytes)
        self.device.launch(kernel.decode(), grid, block, shared, content, bool(programmatic))

    def _tensor(self, data: int, nbytes: int) -> int:
        if (data, nbytes) not in self._tensors:
            content = np.frombuffer(ctypes.string_at(data, nbytes), np.uint8)
            self._tensors[data, nbytes] = self.device.tensor(content, "tensor", readonly=False)
        return self._tensors[data, nbytes]

    def _finish(self) -> None:
        for (data, nbytes), address in self._tensors.items():
            ctypes.memmove(data, self.device.download(address, nbytes), nbytes)
        self._tensors.clear()


def pack(content: str, n: int, k: int, layout: str) -> torch.Tensor:
    return torch.ops.unweight._pack(weight(content, n, k), LAYOUTS.index(layout), [n, k], 0)


def refused(gpu: Gpu, message: str, name: str, *arguments: object, **options: object) -> None:
    try:
        gpu.call(name, *arguments, **options)
    except RuntimeError as error:
        assert str(error).startswith(message), error
    else:
        raise AssertionError(f"{name} didn't refuse: {message}")
