"""Layouts of matrices in shared memory as the PTX ISA writes them: nested (shape) : (stride), then a swizzle."""

import numpy as np


def flat(shape, stride, index):
    """A nested-strides layout ((shape), (stride)) at a linear index, first mode fastest: what the ISA's tables mean."""
    if isinstance(shape, int):
        return index * stride
    total = 0
    for s, d in zip(shape, stride, strict=True):
        size = np.prod(np.array(flatten(s)))
        total += flat(s, d, index % size)
        index //= size
    return total


def flatten(shape):
    return [shape] if isinstance(shape, int) else [x for s in shape for x in flatten(s)]


def swizzled(bits: int, element: int, size: int) -> int:
    """Swizzle<bits, 4, 3> on the byte address of an element."""
    byte = element * size
    return byte ^ ((byte >> 7 & (1 << bits) - 1) << 4)


def descriptor(leading: int, stride: int, mode: int, start: int = 0) -> int:
    """Offsets are given as they are encoded, in units of 16 bytes."""
    return start >> 4 | leading << 16 | stride << 32 | mode << 62
