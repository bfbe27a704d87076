"""Shared-memory operands and the arithmetic of wgmma (and of mma.sync), on arrays: nothing of warps is known here."""

from dataclasses import dataclass

import numpy as np

SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # by the descriptor's mode; 16: not swizzled
_SWIZZLE_MASK = {0: 0, 1: 7, 2: 3, 3: 1}
K = 16  # of 16-bit elements
ELEMENT_BYTES = 2


class DescriptorError(ValueError):
    """A matrix descriptor that wgmma doesn't take."""


@dataclass(frozen=True)
class Descriptor:
    """Where a matrix lies in shared memory. Byte offsets: leading and stride dimension."""

    start: int
    leading: int
    stride: int
    mode: int

    @property
    def swizzle_bytes(self) -> int:
        return SWIZZLE_BYTES[self.mode]


def decode_descriptor(bits: int) -> Descriptor:
    """The 64 bits of a descriptor. Raises DescriptorError for a base offset: our operands start on a whole pattern."""

    def field(low: int) -> int:
        return (bits >> low & 0x3FFF) << 4

    base_offset = bits >> 49 & 7
    if base_offset:
        raise DescriptorError(f"base offset {base_offset}: only 0 is supported")
    return Descriptor(field(0), field(16), field(32), bits >> 62 & 3)


def element_addresses(descriptor: Descriptor, rows: int, mn_major: bool, columns: int = K, size: int = ELEMENT_BYTES):
    """Shared addresses of the elements [mn, k] → int64[rows, columns]; `size` is an element's bytes."""
    d = descriptor
    mn, k = np.arange(rows)[:, None], np.arange(columns)[None]
    unit = 16 // size  # elements of 16 bytes
    width = d.swizzle_bytes  # bytes of a row of the repeating pattern
    if not mn_major:
        across = d.leading if d.mode == 0 else 16
        offset = mn // 8 * d.stride + mn % 8 * width + k // unit * across + k % unit * size
    elif d.mode == 0:
        offset = mn // unit * d.stride + k // 8 * d.leading + k % 8 * 16 + mn % unit * size
    else:
        span = width // size
        offset = mn // span * d.leading + k // 8 * d.stride + k % 8 * width + mn % span * size
    address = d.start + offset
    # The swizzle works on absolute addresses: bits 4-6 are changed by bits 7-9.
    return address ^ ((address >> 7 & _SWIZZLE_MASK[d.mode]) << 4)


_NO_EXPONENT = -4096  # of a zero: below that of any product


def _exponents(values: np.ndarray, lowest: int) -> np.ndarray:
    """int16, at least `lowest`; those of zeros are so low that they never are the largest."""
    exponents = np.maximum(np.frexp(values)[1] - 1, lowest).astype(np.int16)
    return np.where(values == 0, np.int16(_NO_EXPONENT), exponents)


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest_exponent: int = -126) -> np.ndarray:
    """float64 a[M, K] · b[N, K]ᵀ + c[M, N] as Hopper's tensor cores do it → float32[M, N].

    All K products and c are added at once: each is cut to 25 bits after the point of the largest exponent (a product:
    the sum of its factors'), and the sum is rounded toward zero to FP32. lowest_exponent is that of the elements'
    subnormals. The model is MMA-Sim's; nothing here has compared it with a GPU.
    """
    with np.errstate(all="ignore"):
        of_a, of_b = _exponents(a, lowest_exponent), _exponents(b, lowest_exponent)
        largest = _exponents(c, -126)
        # One k after the other, in place: arrays of all products at once leave the caches.
        for k in range(a.shape[1]):
            np.maximum(largest, np.add.outer(of_a[:, k], of_b[:, k]), out=largest)
        largest = np.maximum(largest, -300)  # where all terms are zeros
        scale = np.ldexp(1.0, 25 - largest.astype(np.int32))
        total = np.trunc(c * scale)
        term = np.empty_like(total)
        for k in range(a.shape[1]):
            np.multiply.outer(a[:, k], b[:, k], out=term)
            term *= scale
            total += np.trunc(term, out=term)
        total /= scale
        rounded = total.astype(np.float32)
        too_far = np.abs(rounded.astype(np.float64)) > np.abs(total)
        rounded = np.where(too_far, np.nextafter(rounded, np.float32(0)), rounded)
        special = ~np.isfinite(a).all(axis=1)[:, None] | ~np.isfinite(b).all(axis=1) | ~np.isfinite(c)
        if special.any():
            m, n = np.nonzero(special)
            terms = np.concatenate([a[m] * b[n], c[m, n, None]], axis=1)
            rounded[special] = terms.sum(axis=1).astype(np.float32)
        # Cancellation gives +0, as in any round-toward-zero sum.
        return np.where(rounded == 0, np.float32(0), rounded)
