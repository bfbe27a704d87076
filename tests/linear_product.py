"""The fused product on the simulated device, beside the stepped reference: for the tests of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import linear_reference as stepped
import numpy as np
import torch
from cuda_reading import ANY, pack
from native_module import native
from ptxsim.device import SimulatedDevice
from reference_cases import content

CONFIGS = tuple(native.LinearConfig(*sizes) for sizes in native.linear_configs())
NAN = 0x7FC1  # what lies between rows of x, so that nobody reads it unseen


def config(tokens: int) -> object:
    """The instance that multiplies with so many tokens at once."""
    return next(c for c in CONFIGS if c.tokens == tokens)


@dataclass
class Weight:
    """Packed [N, row_bytes], or a stack of experts [E, N, row_bytes], and what goes with it."""

    packed: np.ndarray  # uint8
    columns: int
    bias: np.ndarray | None = None  # BF16 as uint16, [N] or [E, N]
    layout: int = ANY  # what the caller says that it is
    gap: int = 0  # elements between two rows of y
    rows: int = field(init=False)
    matrices: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.packed.shape[-2]
        self.matrices = len(self.packed) if self.packed.ndim == 3 else 1

    def matrix(self, number: int) -> np.ndarray:
        return self.packed.reshape(self.matrices, self.rows, -1)[number]


@dataclass
class Product:
    """y = x · Wᵀ + bias for one or several weights; x is BF16 [M, K] as uint16."""

    weights: Sequence[Weight]
    x: np.ndarray
    config: object
    offsets: Sequence[int] | None = None  # where the rows of each expert end
    float_output: bool = False
    gap: int = 0  # elements between two rows of x, beside those that make the stride a multiple of 8
    multiprocessors: int = 3
    seed: int = 0
    next: np.ndarray | None = None  # packed weight that the kernel is told comes next

    def run(self) -> list[np.ndarray]:
        """y of each weight [M, N]: uint16, or float32. Any report of the interpreter is an error."""
        self.device = SimulatedDevice(self.multiprocessors, self.seed)
        self.call = self._call()
        native.linear(self.device, self.call, self.config)
        return self.read()

    def read(self) -> list[np.ndarray]:
        return [self._read(weight, out) for weight, out in zip(self.weights, self._outputs, strict=True)]

    def _call(self) -> object:
        device, (tokens, columns) = self.device, self.x.shape
        stride = -(-columns // 8) * 8 + self.gap
        rows = np.full((tokens, stride), NAN, np.uint16)
        rows[:, :columns] = self.x
        # Nothing behind the last row: it ends where its elements end.
        x = device.tensor(rows.reshape(-1)[: max((tokens - 1) * stride + columns, 0)], "x")
        self._outputs = []
        weights = []
        for number, weight in enumerate(self.weights):
            size = (weight.rows + weight.gap) * max(tokens - 1, 0) + weight.rows
            out = device.allocate(self._size * size, f"y{number}")
            self._outputs.append(out)
            packed = native.PackedMatrices(
                device.tensor(weight.packed.reshape(-1), f"packed{number}"),
                weight.packed.size // weight.matrices,
                weight.rows,
                weight.columns,
                weight.matrices,
                layout=weight.layout,
            )
            bias = 0 if weight.bias is None else device.tensor(weight.bias.reshape(-1), f"bias{number}")
            weights.append(native.LinearWeight(packed, bias, out, weight.rows + weight.gap))
        offsets = 0
        if self.offsets is not None:
            offsets = device.tensor(np.array(self.offsets, np.int32), "offsets")
        after, after_bytes = 0, 0
        if self.next is not None:
            after, after_bytes = device.tensor(self.next.reshape(-1), "next"), self.next.size
        return native.LinearCall(weights, tokens, x, stride, offsets, self.float_output, after, after_bytes)

    @property
    def _size(self) -> int:
        return 4 if self.float_output else 2

    def _read(self, weight: Weight, out: int) -> np.ndarray:
        """Every element must have been written, and nothing between the rows."""
        stride, dtype = weight.rows + weight.gap, np.float32 if self.float_output else np.uint16
        y = np.empty((len(self.x), weight.rows), dtype)
        region, size = self.device.machine.memory.find(out), self._size
        for token, row in enumerate(y):
            row[:] = self.device.read(out + size * token * stride, dtype, (weight.rows,))
        # What lies between the rows: never written.
        for token in range(len(self.x) - 1):
            for element in range(token * stride + weight.rows, (token + 1) * stride):
                assert region.first_unwritten(size * element, size * element + 1) == size * element, (
                    f"y: wrote element {element}, which belongs to no row"
                )
        return y

    def expected(self) -> list[np.ndarray]:
        """The stepped reference of the same call, summed as its CTAs share the work."""
        weights = [[stepped.read_weights(w.matrix(m)) for m in range(w.matrices)] for w in self.weights]
        cut = native.cut_linear(self.call, self.config, self.multiprocessors)
        ranges, tile = self.ranges(), self.config.tokens
        chunks = None if len(self.x) <= native.invariant_tokens else cut.chunks
        chains = stepped.cut_chains(weights, ranges, tile, self.config.warpgroups, self.multiprocessors, chunks)
        result = []
        for number, weight in enumerate(self.weights):
            y = np.zeros((len(self.x), weight.rows), np.float32 if self.float_output else np.uint16)
            for matrix, (begin, end) in enumerate(ranges):
                w = weights[number][matrix]
                bias = None if weight.bias is None else weight.bias.reshape(weight.matrices, -1)[matrix]
                for first in range(begin, end, tile):
                    rows = slice(first, min(first + tile, end))
                    cuts = [chains[number, matrix, first, block] for block in range(w.blocks)]
                    y[rows] = stepped.finish(stepped.multiply(w, self.x[rows], cuts), bias, self.float_output)
            result.append(y)
        return result

    def ranges(self) -> list[tuple[int, int]]:
        """Rows of x of each matrix."""
        if self.offsets is None:
            return [(0, len(self.x))]
        ends = np.maximum.accumulate(np.clip(self.offsets, 0, len(self.x))).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def check(self) -> list[np.ndarray]:
        """Runs and compares; returns y."""
        got = self.run()
        for number, (y, expected) in enumerate(zip(got, self.expected(), strict=True)):
            assert_same(y, expected, f"y{number}")
        return got


def assert_same(got: np.ndarray, expected: np.ndarray, what: str = "y") -> None:
    """Bit for bit, but for the payloads of NaNs; names the first element that differs."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.dtype == np.float32:
        got, expected = (np.where(np.isnan(v), np.float32(np.nan), v).view(np.uint32) for v in (got, expected))
    different = np.argwhere(got != expected)
    if len(different):
        at = tuple(int(i) for i in different[0])
        rows, columns = (np.unique(axis) for axis in different.T)
        raise AssertionError(
            f"{what}: {len(different)} of {got.size} elements differ, first token {at[0]}, row {at[1]}: {got[at]:#x}, "
            f"expected {expected[at]:#x}; tokens {rows[:9].tolist()}, rows {columns[:9].tolist()}"
        )


def packed(name: str, shape: tuple[int, ...], layout: str, seed: int = 0) -> np.ndarray:
    """One of CONTENTS, [N, K] or [E, N, K], in the layout asked for."""
    weights = torch.from_numpy(content(name, shape, seed).view(np.int16)).view(torch.bfloat16)
    return pack(weights, layout, stacked=len(shape) == 3).numpy()


def tokens(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """BF16 activations of usual size, as uint16."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
