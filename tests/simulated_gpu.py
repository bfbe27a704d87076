"""The operators for CUDA tensors, run on the PTX interpreter: a program, since it loads the extension's operators from
a library of its own, tests/_simulated in the place of the CUDA runtime.

    python tests/simulated_gpu.py LIBRARY CASE
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_char_p, c_int, c_uint32, c_uint64, c_void_p

import numpy as np
import torch
from ptxsim.device import SimulatedDevice
from samples import LAYOUTS, assert_same_bits, assert_same_bytes, weight

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Gpu:
    """What tests/_simulated/device.cpp calls, on a SimulatedDevice."""

    SIGNATURES = (
        ("error", CFUNCTYPE(c_char_p)),
        ("captures", CFUNCTYPE(c_int)),
        ("multiprocessors", CFUNCTYPE(c_int)),
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
        self.failure: BaseException | None = None  # of a call from C++, which can't raise it
        self._tensors: dict[tuple[int, int], int] = {}  # (host address, bytes) -> address on the device
        self._callbacks = [kind(self._guarded(getattr(self, f"_{name}"))) for name, kind in self.SIGNATURES]
        table = (c_void_p * len(self._callbacks))(*(ctypes.cast(f, c_void_p).value for f in self._callbacks))
        ctypes.CDLL(library).unweight_simulate(table)

    def call(self, name: str, *arguments: object, **options: object) -> torch.Tensor:
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


def unpack(gpu: Gpu) -> None:
    w = weight("few outsiders", 70, 200)
    for layout in LAYOUTS:
        packed = pack("few outsiders", 70, 200, layout)
        assert_same_bits(gpu.call("unpack", packed, 200, torch.bfloat16), w)
        assert_same_bits(gpu.call("_unpack", packed, 200, 3), w)
    refused(gpu, "in_features: 201, expected 200, the in_features", "unpack", packed, 201, torch.bfloat16)
    refused(gpu, "in_features: 70000, expected that of packed_w, whose", "unpack", packed, 70000, torch.bfloat16)
    packed[-1, -1] += 1
    refused(gpu, "packed: ", "unpack", packed, 200, torch.bfloat16)


def stacks(gpu: Gpu) -> None:
    w = torch.stack([weight("trained", 16, 40, seed) for seed in range(3)])
    packed = torch.ops.unweight._pack(w, 1, [16, 40], 0)
    assert_same_bits(gpu.call("unpack", packed, 40, torch.bfloat16), w)
    gpu.call("_verify", packed)
    assert_same_bytes(gpu.call("_transcode", packed, 2, 0), torch.ops.unweight._transcode(packed, 2, 0))
    assert gpu.call("unpack", packed[:0], 40, torch.bfloat16).shape == (0, 16, 40)
    gpu.call("_verify", packed[:0])
    refused(gpu, "row_bytes: 9223372036854775807, expected 1 to ", "_resize", packed[:0], 2**63 - 1)


def transcode(gpu: Gpu) -> None:
    packed = pack("trained", 70, 200, "archive")
    for layout in range(4):
        assert_same_bytes(gpu.call("_transcode", packed, layout, 0), torch.ops.unweight._transcode(packed, layout, 0))
    weight_again = gpu.call("_pack", weight("trained", 70, 200), 3, [70, 200], 0)
    assert_same_bytes(weight_again, packed)


def embedding(gpu: Gpu) -> None:
    w = weight("few outsiders", 70, 200)
    for layout in LAYOUTS:
        packed = pack("few outsiders", 70, 200, layout)
        for ids in (
            torch.tensor([[3, 69], [0, 3]]),
            torch.tensor([5, 64], dtype=torch.int32),
            torch.tensor([])[:0].long(),
        ):
            assert_same_bits(gpu.call("embedding", ids, packed, 200), w[ids.long()])
    rows = gpu.call("embedding", torch.tensor([1, 70, -1]), packed, 200)
    assert_same_bits(rows[0], w[1])
    assert (rows[1:].view(torch.int16) == 0x7FFF).all()
    refused(gpu, "ids: dtype torch.float32, expected torch.int64", "embedding", torch.zeros(1), packed, 200)
    ids = torch.tensor([1])
    refused(gpu, "embedding_dim: 70000, expected that of packed_w, whose", "embedding", ids, packed, 70000)


def linear(gpu: Gpu) -> None:
    packed, x, bias = pack("trained", 70, 200, "huffman"), torch.randn(3, 200), torch.randn(70)
    w = weight("trained", 70, 200)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = x.to(dtype), packed, bias.to(dtype)
        got = gpu.call("linear", *arguments, exact=True)
        assert torch.equal(got, torch.nn.functional.linear(arguments[0], w.to(dtype), arguments[2]))
    gpu.device.launched.clear()
    gpu.call("linear", x, packed, layout=1, exact=True)  # a caller that knows the layout gets its own kernel
    assert "unweight_unpack_huffman" in gpu.device.launched
    assert not {"unweight_unpack_tiles", "unweight_unpack_archive"} & set(gpu.device.launched)
    assert gpu.call("linear", x, packed, layout=2, exact=True).isnan().all()  # the weight is of another
    refused(gpu, "layout: 4, expected 0", "linear", x, packed, layout=4, exact=True)
    refused(gpu, "bias: shape [3], expected [70]", "linear", x, packed, torch.zeros(3), exact=True)


def headers(gpu: Gpu) -> None:
    for layout in LAYOUTS:
        packed = pack("trained", 70, 200, layout)
        gpu.call("_verify", packed)
        assert torch.equal(gpu.call("_describe", packed), torch.ops.unweight._describe(packed))
        for row_bytes in (packed.shape[1], packed.shape[1] + 33):
            expected = torch.ops.unweight._resize(packed, row_bytes)
            assert_same_bytes(gpu.call("_resize", packed, row_bytes), expected)
        refused(gpu, "row_bytes: 1, expected at least ", "_resize", packed, 1)
        other = packed.view(35, -1)
        for name, *arguments in (("_verify",), ("_describe",), ("_resize", other.shape[1]), ("_transcode", 0, 0)):
            refused(gpu, "packed_w: its shape says 35 out_features, its header 70", name, other, *arguments)


def capture(gpu: Gpu) -> None:
    packed = pack("trained", 70, 200, "nibble")
    gpu.captured = True
    for name, *arguments in (
        ("unpack", 200, torch.bfloat16),
        ("_verify",),
        ("_describe",),
        ("_transcode", 1, 0),
        ("_resize", 999),
    ):
        refused(gpu, f"packed_w: {name} waits for the GPU, which a stream that is being", name, packed, *arguments)
    assert_same_bits(gpu.call("embedding", torch.tensor([2]), packed, 200), weight("trained", 70, 200)[2:3])


CASES = (unpack, stacks, transcode, embedding, linear, headers, capture)

if __name__ == "__main__":
    gpu = Gpu(sys.argv[1])
    next(case for case in CASES if case.__name__ == sys.argv[2])(gpu)
    print("ok,", len(gpu.device.launched), "launches")
