"""Packed tensors: `pack`, `unpack`, `transcode`, `verify`, `info`.

A packed tensor is `uint8` of shape [out_features, row_bytes], or [E, out_features, row_bytes] for stacked matrices. It
describes itself; how is the business of the compiled part (docs/FORMAT.md). All functions raise ValueError for bad
values, and leave their arguments as they are. Tensors on a GPU of compute capability 8.0 or newer are worked on there,
but for `pack` and for `transcode` to `archive`; those of older GPUs, and everything else, on the CPU. Results are where
the argument was.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops import LAYOUTS, cuda_problem

_ops = torch.ops.unweight
_MAX_RANK = 8

_REASONS = {
    "raw": "the others would not be smaller",
    "huffman": "the exponents don't fit a window of 16, or too many lie outside it",
}


class LayoutFallback(UserWarning):
    """Another layout was used than the one asked for. The weight is kept bit for bit all the same."""


@dataclass(frozen=True)
class PackedInfo:
    """What a packed tensor holds."""

    layout: str
    shape: tuple[int, ...]  # of the weight that was packed
    out_features: int
    in_features: int
    row_bytes: int
    used_bytes: int  # without the padding at the end; all matrices together
    nbytes: int
    patches: int  # exponents stored verbatim, all matrices together
    matrices: int  # E of stacked matrices, else 1

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight takes, padding included."""
        return 8 * self.row_bytes / self.in_features


@dataclass(frozen=True)
class _Description:
    """The numbers of `unweight::_describe`, in its order."""

    layout: int
    out_features: int
    in_features: int
    used_bytes: int
    row_bytes: int
    patches: int
    code_symbols: int
    nibble_base: int
    segment_stages: int
    data_offset: int
    shape: tuple[int, ...]


@contextmanager
def _value_errors() -> Iterator[None]:
    """Turns what the operators say of their arguments into ValueError; other RuntimeErrors (memory) pass."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if re.match(r"(packed|packed_w|weight|layout|shape|threads|in_features|row_bytes|dtype)\b", text):
            raise ValueError(text) from None
        raise


def _check_packed(packed: Tensor) -> Tensor:
    """A contiguous tensor that may be packed: uint8, 2 or 3 dimensions; on the CPU unless its GPU has kernels."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"packed: {type(packed).__name__}, expected a torch.Tensor")
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed: dtype {packed.dtype}, expected torch.uint8")
    if packed.dim() not in (2, 3) or packed.numel() == 0:
        raise ValueError(
            f"packed: shape {list(packed.shape)}, expected [out_features, row_bytes] or [E, out_features, row_bytes]"
        )
    if packed.device.type not in ("cpu", "cuda"):
        raise ValueError(f"packed: device {packed.device}, expected cpu or cuda")
    on_gpu = packed.device.type == "cuda" and cuda_problem(packed.device) is None
    return (packed.detach() if on_gpu else packed.detach().cpu()).contiguous()


def layout_id(layout: str, device: torch.device | str = "cpu") -> int:
    """The number of a layout's name; `auto` is the default on `device`."""
    if layout == "auto":
        layout = "huffman" if torch.device(device).type == "cuda" else "nibble"
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r}, expected one of 'auto', {', '.join(map(repr, sorted(LAYOUTS)))}")
    return LAYOUTS.index(layout)


def _check_threads(threads: int) -> None:
    if not isinstance(threads, int):
        raise TypeError(f"threads: {type(threads).__name__}, expected an int")
    if threads < 0:
        raise ValueError(f"threads: {threads}, expected 0 (as many as torch uses) or more")


def _describe(packed: Tensor) -> _Description:
    """Reads the header of a packed matrix, or of the first of several."""
    with _value_errors():
        numbers = _ops._describe(packed).tolist()
    rank = numbers[10]
    return _Description(*numbers[:10], shape=tuple(numbers[11 : 11 + rank]))


def _tell_fallback(asked: str, packed: Tensor) -> None:
    if asked == "auto":
        return
    used = LAYOUTS[_describe(_check_packed(packed)).layout]
    if used != asked:
        warnings.warn(
            f"layout: {asked!r} was asked for, {used!r} is used: {_REASONS[used]}", LayoutFallback, stacklevel=3
        )


def pack_quietly(weight: Tensor, layout: str = "auto", *, stacked: bool = False, threads: int = 0) -> Tensor:
    """`pack` without the warning: for callers that report the layout themselves."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: {type(weight).__name__}, expected a torch.Tensor")
    if weight.dtype != torch.bfloat16:
        raise ValueError(f"weight: dtype {weight.dtype}, expected torch.bfloat16")
    if not 2 <= weight.dim() <= _MAX_RANK:
        raise ValueError(f"weight: {weight.dim()} dimensions, expected 2 to {_MAX_RANK}")
    if weight.numel() == 0:
        raise ValueError(f"weight: shape {list(weight.shape)} has no elements, expected at least one")
    if weight.layout != torch.strided:
        raise ValueError(f"weight: {weight.layout}, expected torch.strided")
    if weight.device.type not in ("cpu", "cuda"):
        raise ValueError(f"weight: device {weight.device}, expected cpu or cuda")
    if stacked and weight.dim() != 3:
        raise ValueError(f"weight: {weight.dim()} dimensions, expected 3 for stacked=True")
    _check_threads(threads)
    number = layout_id(layout, weight.device)

    matrices = weight.detach().cpu().contiguous()
    shape = list(weight.shape[1:] if stacked else weight.shape)
    if not stacked:
        matrices = matrices.view(shape[0], -1)  # (N, K)
    with _value_errors():
        packed = _ops._pack(matrices, number, shape, threads)
    return packed.to(weight.device)


def _stacked_bytes(weight: Tensor, layout: str) -> int:
    """What [E, N, K] takes at least as E matrices."""
    experts, *shape = weight.shape
    return experts * _ops._least_bytes(layout_id(layout, weight.device), *shape)


def pack(weight: Tensor, layout: str = "auto", *, stacked: bool = False, threads: int = 0) -> Tensor:
    """Packs a BF16 weight without loss.

    `weight`: bfloat16 with 2 to 8 dimensions, none of them 0, on a CPU or a GPU, of any strides. More than 2 dimensions
    are packed as one matrix [shape[0], -1], unless `stacked` says that a 3-D weight is several ([E, N, K], experts).
    `layout`: `nibble`, `huffman`, `archive`, `raw`, or `auto`, the default of the weight's device. Where a layout
    doesn't fit or doesn't pay another is used, with the warning `LayoutFallback` unless it was `auto`. Layouts
    but `archive` pad to 64 rows and 128 columns: a thin weight can take more bytes than before, as `info` tells.
    `threads`: 0 for as many as torch uses.

    Returns uint8 [N, row_bytes], or [E, N, row_bytes]. Raises ValueError.
    """
    packed = pack_quietly(weight, layout, stacked=stacked, threads=threads)
    _tell_fallback(layout, packed)
    if weight.dim() == 3 and not stacked and packed.numel() > weight.nbytes > _stacked_bytes(weight, layout):
        warnings.warn(
            f"weight: {list(weight.shape)} takes {packed.numel()} bytes packed as one matrix [{weight.shape[0]}, "
            f"{weight.shape[1] * weight.shape[2]}], {weight.nbytes} plain; stacked=True packs it as {weight.shape[0]} "
            f"matrices",
            stacklevel=2,
        )
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Gives the weight back, bit for bit: bfloat16 in its original shape. Raises ValueError for damaged bytes."""
    matrices = _check_packed(packed)
    about = _describe(matrices)
    with _value_errors():
        weight = _ops.unpack(matrices, about.in_features, torch.bfloat16)
    return weight.view(*matrices.shape[:-2], *about.shape).to(packed.device)


def transcode_quietly(packed: Tensor, layout: str, *, threads: int = 0) -> Tensor:
    """`transcode` without the warning: for callers that report the layout themselves."""
    matrices = _check_packed(packed)
    _check_threads(threads)
    number = layout_id(layout, packed.device)
    with _value_errors():
        return _ops._transcode(matrices, number, threads).to(packed.device)


def transcode(packed: Tensor, layout: str, *, threads: int = 0) -> Tensor:
    """The same weight in another layout (see `pack`), without a BF16 copy of the whole. Raises ValueError."""
    result = transcode_quietly(packed, layout, threads=threads)
    _tell_fallback(layout, result)
    return result


def verify(packed: Tensor) -> None:
    """Checks the header and every checksum. Raises ValueError saying what is wrong and where."""
    matrices = _check_packed(packed)
    with _value_errors():
        _ops._verify(matrices)


def info(packed: Tensor) -> PackedInfo:
    """Reads the headers: layout, shape, size. Checks no checksums. Raises ValueError."""
    matrices = _check_packed(packed)
    each = [_describe(m) for m in matrices.view(-1, *matrices.shape[-2:])]
    first = each[0]
    return PackedInfo(
        layout=LAYOUTS[first.layout],
        shape=(*matrices.shape[:-2], *first.shape),
        out_features=first.out_features,
        in_features=first.in_features,
        row_bytes=matrices.shape[-1],
        used_bytes=sum(e.used_bytes for e in each),
        nbytes=matrices.numel(),
        patches=sum(e.patches for e in each),
        matrices=len(each),
    )


def pad_row_bytes(packed: Tensor, row_bytes: int) -> Tensor:
    """The same packed tensor with another `row_bytes`: zeros are added at, or cut off, the end of each matrix.

    Always a copy, in huge pages where the system has them: products read their weights faster from those than from what
    `clone` gives.
    Raises ValueError if the matrix doesn't fit, or if stacked matrices would not start at multiples of 128 bytes.
    """
    matrices = _check_packed(packed)
    with _value_errors():
        return _ops._resize(matrices, row_bytes).to(packed.device)
