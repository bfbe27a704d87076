"""Arrays that take memory only where they are touched: tensors may be larger than the machine that interprets."""

from __future__ import annotations

import mmap

import numpy as np

_LARGE = 1 << 26  # bytes
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.11 on


def zeros(count: int, dtype) -> np.ndarray:
    """`count` zeros."""
    size = count * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.zeros(count, dtype)
    # Not np.zeros: Linux refuses to promise more than the machine has, unless it is asked not to promise.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return np.frombuffer(memory, dtype)


def filled(count: int, byte: int) -> np.ndarray:
    """uint8, of unknown content: `byte`, or zeros where there are many."""
    return np.full(count, byte, np.uint8) if count < _LARGE else zeros(count, np.uint8)
