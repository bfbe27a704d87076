"""Bytes to packed bytes and back, for one tensor of a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from ..ops import LAYOUTS
from .container import matrix_shape
from .errors import CheckpointError, DamagedError
from .safetensors_io import Entry

DISK_LAYOUT = "archive"
MAX_RANK = 8

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


def is_packable(entry: Entry, layout: str) -> bool:
    """Whether packing may make a tensor smaller, as far as its dtype and shape tell.

    Layouts of tiles pad: what has few columns could take many times its size while it is packed. And all have a limit.
    """
    if entry.dtype != "BF16" or not 2 <= len(entry.shape) <= MAX_RANK or entry.numel == 0:
        return False
    *stack, n, k = matrix_shape(entry.shape, is_experts(entry))
    if max(n, k) >= 1 << 63:
        return False
    return prod(stack) * torch.ops.unweight._least_bytes(LAYOUTS.index(layout), n, k) < entry.nbytes


# How the operators begin to say what is wrong with packed bytes.
_DAMAGE = ("packed", "in_features")
_NO_MEMORY = ("alloc", "not enough memory", "aten::new_empty", "aten::empty")


@contextmanager
def operator_errors(where: str) -> Iterator[None]:
    """Tells damaged bytes, of which this says where they are, from a system that has no memory left."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if text.startswith(_DAMAGE):
            raise DamagedError(f"{where}: {text}") from None
        if any(sign in text for sign in _NO_MEMORY):
            raise MemoryError(f"({where})") from None
        raise


def pack_bytes(data: memoryview, entry: Entry, layout: str, where: str, threads: int) -> Tensor:
    """Packs the bytes of a BF16 tensor: uint8 [N, row_bytes] or, for experts, [E, N, row_bytes]."""
    stacked = is_experts(entry)
    weight = torch.frombuffer(data, dtype=torch.bfloat16).view(matrix_shape(entry.shape, stacked))
    shape = entry.shape[1:] if stacked else entry.shape
    with operator_errors(where):
        return torch.ops.unweight._pack(weight, LAYOUTS.index(layout), shape, threads)


def unpack_bytes(data: memoryview, stored: Entry, original: Entry, where: str, threads: int) -> Tensor:
    """The original bytes of a packed tensor, uint8 [nbytes]. Raises DamagedError."""
    packed = torch.frombuffer(data, dtype=torch.uint8).view(stored.shape)
    columns = matrix_shape(original.shape, len(stored.shape) == 3)[-1]
    with operator_errors(where):
        weight = torch.ops.unweight._unpack(packed, columns, threads)
    return weight.view(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def describe(data: memoryview, stored: Entry, where: str) -> tuple[int, int]:
    """The layout's number and how many patches there are, all matrices together. Raises DamagedError."""
    packed = torch.frombuffer(data, dtype=torch.uint8).view(-1, *stored.shape[-2:])
    with operator_errors(where):
        numbers = [torch.ops.unweight._describe(matrix).tolist() for matrix in packed]
    return numbers[0][0], sum(n[5] for n in numbers)
