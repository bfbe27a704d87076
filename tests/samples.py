"""Weights for tests: contents that look trained, and contents made to hurt."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LAYOUTS = ("raw", "huffman", "nibble", "archive")
SHAPES = (
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 128),
    (63, 127),
    (64, 128),
    (65, 129),
    (16, 16),
    (17, 1030),
    (200, 384),
    (128, 4224),
)


def _trained(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return from_float(rng.standard_t(5, (n, k)) * 0.02)


def _any_bits(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.integers(0, 65536, (n, k), np.uint16)


def _zeros(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return np.zeros((n, k), np.uint16)


def _all_equal(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return np.full((n, k), rng.integers(0, 65536), np.uint16)


def _zero_rows(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    bits = _trained(rng, n, k)
    bits[rng.random(n) < 0.3] = 0
    return bits


def _pruned(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    bits = _trained(rng, n, k)
    bits[rng.random((n, k)) < 0.5] = 0
    return bits


def _few_outsiders(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Trained, with a sprinkle of NaN payloads, infinities, both zeros and large values: patches in every layout."""
    bits = _trained(rng, n, k)
    special = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0000, 0x8000, 0x4B12, 0xCEAD], np.uint16)
    where = rng.random((n, k)) < 0.002
    bits[where] = rng.choice(special, where.sum())
    return bits


def _huge(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Trained, with a few values too far out to be scaled as nibble scales them."""
    bits = _trained(rng, n, k)
    bits[rng.random((n, k)) < 0.001] = 0xDFAD
    bits[0, 0] = 0x5F12
    return bits


def _subnormals(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    bits = _trained(rng, n, k)
    where = rng.random((n, k)) < 0.01
    bits[where] = rng.integers(1, 128, where.sum(), np.uint16) | (rng.integers(0, 2, where.sum(), np.uint16) << 15)
    return bits


def _stripes(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Columns 40 exponents apart, so half of them are outsiders to any window."""
    bits = _trained(rng, n, k)
    bits[:, ::2] = from_float(rng.standard_t(5, (n, k)) * 1e10)[:, ::2]
    return bits


def _one_bad_stage(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Trained but for one corner of arbitrary bits: too many patches for its stage."""
    bits = _trained(rng, n, k)
    corner = bits[: min(n, 60), : min(k, 100)]
    corner[:] = rng.integers(0, 65536, corner.shape, np.uint16)
    return bits


CONTENTS = {
    "trained": _trained,
    "any bits": _any_bits,
    "zeros": _zeros,
    "all equal": _all_equal,
    "zero rows": _zero_rows,
    "pruned": _pruned,
    "few outsiders": _few_outsiders,
    "huge": _huge,
    "subnormals": _subnormals,
    "stripes": _stripes,
    "one bad stage": _one_bad_stage,
}


def from_float(values: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) nearest to float values."""
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def bits(content: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """uint16 [n, k] of one of CONTENTS."""
    return np.ascontiguousarray(CONTENTS[content](np.random.default_rng(seed), n, k))


def weight(content: str, n: int, k: int, seed: int = 0) -> Tensor:
    """bfloat16 [n, k] of one of CONTENTS."""
    return torch.from_numpy(bits(content, n, k, seed).view(np.int16)).view(torch.bfloat16)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN payloads and signs of zero included; names the first element that differs."""
    assert got.shape == expected.shape and got.dtype == expected.dtype == torch.bfloat16
    different = (got.view(torch.int16) != expected.view(torch.int16)).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{len(different)} of {expected.numel()} weights differ, first {at}: "
            f"{got[at].view(torch.int16).item() & 0xFFFF:#06x}, expected "
            f"{expected[at].view(torch.int16).item() & 0xFFFF:#06x}"
        )


def assert_same_bytes(got: Tensor, expected: Tensor, what: object = "") -> None:
    """Packed tensors are equal; says sizes or the first byte that differs, without printing the tensors."""
    assert got.dtype == expected.dtype == torch.uint8
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}"
    different = (got.flatten() != expected.flatten()).nonzero()
    if len(different):
        at = int(different[0])
        a, b = int(got.flatten()[at]), int(expected.flatten()[at])
        raise AssertionError(f"{what}: {len(different)} bytes differ, first byte {at}: {a:#04x}, expected {b:#04x}")


def keep_for_the_sanitizers(packed: Tensor) -> None:
    """Where UNWEIGHT_CORPUS names a folder: puts damaged bytes there, for tests/native/run_sanitizers.sh to replay."""
    if folder := os.environ.get("UNWEIGHT_CORPUS"):
        data = packed.contiguous().numpy().tobytes()
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{hashlib.blake2b(data, digest_size=12).hexdigest()}.packed").write_bytes(data)
