"""What the tests of the reference share: contents made to hurt it, and a look into packed tensors."""

import itertools

import numpy as np
import samples

from unweight_ext import reference

LAYOUTS = reference.LAYOUTS
SPECIALS = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x0080, 0x7F7F, 0x3F80], np.uint16
)


def _constant_rows(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return np.repeat(rng.integers(0, 1 << 16, (n, 1), np.uint16), k, axis=1)


def _specials(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.choice(SPECIALS, (n, k))


def _one_special(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return np.full((n, k), rng.choice(SPECIALS))


def _patched(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Trained, with as many outsiders as `nibble` takes."""
    bits = samples.CONTENTS["trained"](rng, n, k)
    return np.where(rng.random((n, k)) < 0.001, rng.choice(SPECIALS[:7], (n, k)), bits)


def _half_noise(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Trained but for columns 128 to 255: raw stages between others."""
    bits = samples.CONTENTS["trained"](rng, n, k)
    bits[:, 128:256] = rng.integers(0, 1 << 16, bits[:, 128:256].shape, np.uint16)
    return bits


def _some_noise(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """More different pairs than a code has, most of them rare."""
    noise = rng.integers(0, 1 << 16, (n, k), np.uint16)
    return np.where(rng.random((n, k)) < 0.2, noise, samples.CONTENTS["trained"](rng, n, k))


def _narrow(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """A few exponents around any: every base of the window, codes without patches."""
    exponent = np.clip(rng.integers(0, 256) + rng.integers(0, 4, (n, k)), 0, 255)
    return (rng.integers(0, 1 << 16, (n, k), np.uint16) & 0x807F) | (exponent << 7).astype(np.uint16)


CONTENTS = {
    **samples.CONTENTS,
    "constant rows": _constant_rows,
    "specials": _specials,
    "one special": _one_special,
    "patched": _patched,
    "half noise": _half_noise,
    "some noise": _some_noise,
    "narrow": _narrow,
}


def content(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """uint16 of `shape`, [N, K] or [E, N, K], of one of CONTENTS."""
    rng = np.random.default_rng(seed)
    matrices = [CONTENTS[name](rng, *shape[-2:]) for _ in range(shape[0] if len(shape) == 3 else 1)]
    return np.ascontiguousarray(matrices).reshape(shape)


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.uint16 and got.shape == expected.shape
    wrong = np.argwhere(got != expected)
    assert not len(wrong), f"{len(wrong)} weights differ, the first at {wrong[0]}"


def stages_of(packed: np.ndarray) -> list[np.ndarray]:
    """The units of a packed matrix, u8 each."""
    flat, header = packed.reshape(-1), reference.parse_header(packed)
    units = -(-header.n // 64) * -(-header.k // 128)
    index = flat[header.index_offset :][: 4 * (units + 1)].view("<u4").astype(int)
    return [flat[header.data_offset + 16 * a : header.data_offset + 16 * b] for a, b in itertools.pairwise(index)]


def seal(packed: np.ndarray) -> None:
    """Make all checksums right again, so that damaged bytes get past them. Does nothing if the header is nonsense."""
    flat = packed.reshape(-1)
    layout = LAYOUTS[flat[10] % 4]
    n, k, _, index_offset, sums_offset, data_offset = (int(x) for x in flat[24:72].view("<u8"))
    if not (0 < n < 1 << 20 and 0 < k < 1 << 20 and 0 < index_offset < sums_offset < data_offset <= flat.size):
        return
    blocks, units = reference._blocks_and_units(layout, n, k)
    index_bytes = flat[index_offset:][: 4 * (units + 1)]
    if len(index_bytes) == 4 * (units + 1) and sums_offset + 8 * blocks <= data_offset:
        index = index_bytes.view("<u4").astype(int)
        starts = (data_offset + 16 * index)[:: units // blocks]
        for b, (start, end) in enumerate(itertools.pairwise(starts)):
            data = flat[start:end]
            flat[sums_offset + 8 * b :][:8].view("<u8")[0] = reference.checksum(data[: len(data) // 4 * 4])
    flat[16:24] = 0
    flat[16:24].view("<u8")[0] = reference.checksum(flat[: data_offset // 4 * 4])
