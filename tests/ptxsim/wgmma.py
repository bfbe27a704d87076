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


def _exponents(values: np.ndarray, lowest: int) -> np.ndarray:
    return np.maximum(np.frexp(values)[1] - 1, lowest)


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, lowest_exponent: int = -126) -> np.ndarray:
    """float64 a[M, K] · b[N, K]ᵀ + c[M, N] as Hopper's tensor cores do it → float32[M, N].

    All K products and c are added at once: each is cut to 25 bits after the point of the largest exponent (a product:
    the sum of its factors'), and the sum is rounded toward zero to FP32. lowest_exponent is that of the elements'
    subnormals. The model is MMA-Sim's; nothing here has compared it with a GPU.
    """
    with np.errstate(all="ignore"):
        products = a[:, None, :] * b[None, :, :]
        terms = np.concatenate([products, c[:, :, None]], axis=2)
        of_a, of_b = _exponents(a, lowest_exponent), _exponents(b, lowest_exponent)
        exponents = np.concatenate([of_a[:, None, :] + of_b[None, :, :], _exponents(c, -126)[:, :, None]], axis=2)
        largest = np.where(terms == 0, -1000, exponents).max(axis=2)
        unit = np.ldexp(1.0, largest - 25)
        total = np.trunc(terms / unit[:, :, None]).sum(axis=2) * unit
        rounded = total.astype(np.float32)
        too_far = np.abs(rounded.astype(np.float64)) > np.abs(total)
        rounded = np.where(too_far, np.nextafter(rounded, np.float32(0)), rounded)
        special = ~np.isfinite(terms).all(axis=2)
        if special.any():
            rounded[special] = terms[special].sum(axis=1).astype(np.float32)
        # Cancellation gives +0, as in any round-toward-zero sum.
        return np.where(rounded == 0, np.float32(0), rounded)
