"""Bytes to packed bytes and back, for one tensor of a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..ops import LAYOUTS
from .container import matrix_shape
from .errors import CheckpointError, DamagedError
from .safetensors_io import Entry

DISK_LAYOUT = "archive"
MAX_RANK = 8
_MAX_DIMENSION = 1 << 32
_MAX_WEIGHTS = 1 << 40

# Memory of one tensor at work, in parts of its original size. Packing: the weight, the encoded blocks, and the result
# they are copied to. Unpacking: the packed bytes and the weight.
PACK_COST = 2.5
UNPACK_COST = 1.8


def check_layout(layout: str) -> str:
    """The layout's name; `auto` is what suits a disk best."""
    if layout == "auto":
        return DISK_LAYOUT
    if layout not in LAYOUTS or layout == "raw":
        names = ", ".join(repr(n) for n in sorted(LAYOUTS) if n != "raw")
        raise CheckpointError(f"layout: {layout!r}, expected one of 'auto', {names}")
    return layout


def is_experts(entry: Entry) -> bool:
    """Whether a tensor is one matrix per expert, [E, N, K]. Only names tell: a convolution has 3 dimensions too."""
    return len(entry.shape) == 3 and "experts" in entry.name.split(".")


def is_packable(entry: Entry) -> bool:
    if entry.dtype != "BF16" or not 2 <= len(entry.shape) <= MAX_RANK or entry.numel == 0:
        return False
    n, k = matrix_shape(entry.shape, is_experts(entry))[-2:]
    return max(n, k) < _MAX_DIMENSION and n * k < _MAX_WEIGHTS


@contextmanager
def _damaged(where: str) -> Iterator[None]:
    """The operators say what is wrong with packed bytes; this adds where they are."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "allocate memory" in text:
            raise MemoryError(text) from None
        raise DamagedError(f"{where}: {text}") from None


def pack_bytes(data: memoryview, entry: Entry, layout: str, threads: int) -> Tensor:
    """Packs the bytes of a BF16 tensor: uint8 [N, row_bytes] or, for experts, [E, N, row_bytes]."""
    stacked = is_experts(entry)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % 2:  # legal in a file, not for 16-bit loads
        raw = raw.clone()
    weight = raw.view(torch.bfloat16).view(matrix_shape(entry.shape, stacked))
    return torch.ops.unweight._pack(weight, LAYOUTS.index(layout), entry.shape[1:] if stacked else entry.shape, threads)


@contextmanager
def unpack_threads() -> Iterator[None]:
    """`unpack_bytes` sets torch's number of threads, which is kept per thread; this restores it for threads to come."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(number)


def unpack_bytes(data: memoryview, stored: Entry, original: Entry, where: str, threads: int) -> Tensor:
    """The original bytes of a packed tensor, uint8 [nbytes]. Called by a worker's thread. Raises DamagedError."""
    torch.set_num_threads(threads)
    packed = torch.frombuffer(data, dtype=torch.uint8).view(stored.shape)
    columns = matrix_shape(original.shape, len(stored.shape) == 3)[-1]
    with _damaged(where):
        weight = torch.ops.unweight.unpack(packed, columns, torch.bfloat16)
    return weight.view(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def describe(data: memoryview, stored: Entry, where: str) -> tuple[int, int]:
    """The layout's number and how many patches there are, all matrices together. Raises DamagedError."""
    packed = torch.frombuffer(data, dtype=torch.uint8).view(-1, *stored.shape[-2:])
    with _damaged(where):
        numbers = [torch.ops.unweight._describe(matrix).tolist() for matrix in packed]
    return numbers[0][0], sum(n[5] for n in numbers)
