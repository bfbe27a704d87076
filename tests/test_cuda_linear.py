"""One weight in the fused product: the stepped reference's bits, for every configuration, layout, shape and content."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_reading import ANY, layout_number, pack
from linear_product import CONFIGS, Product, Weight, config, packed, tokens
from native_module import native
from reference_cases import CONTENTS, content, stages_of
from samples import from_float

from unweight_ext import reference, reference_tiles
from unweight_ext.packed import pack_quietly

LAYOUTS = ("raw", "huffman", "nibble")
NAMES = {"raw": "any bits", "huffman": "few outsiders", "nibble": "few outsiders"}
SIZES = [c.tokens for c in CONFIGS]
slow = pytest.mark.slow


def bias(rows: int, seed: int = 5) -> np.ndarray:
    return from_float(np.random.default_rng(seed).standard_normal(rows))


def test_the_configurations_are_those_that_are_swept() -> None:
    assert SIZES == [8, 16, 32, 64, 128, 256]
    assert len({c.warpgroups for c in CONFIGS if c.tokens <= native.invariant_tokens}) == 1


def kernels_and_seeds() -> list:
    """(size, layout, known, seed): by default each of the 24 kernels once; all layouts and more seeds are slow."""
    cases = itertools.product(SIZES, LAYOUTS, (True, False), range(4))
    usual = {(size, LAYOUTS[number % 3]) for number, size in enumerate(SIZES)}
    return [
        pytest.param(
            *(size, layout, known, seed),
            marks=[] if seed == 0 and (known or (size, layout) in usual) else slow,
            id=f"{size}-{layout}-{'known' if known else 'any'}-{seed}",
        )
        for size, layout, known, seed in cases
    ]


@pytest.mark.parametrize(("size", "layout", "known", "seed"), kernels_and_seeds())
def test_configurations(size: int, layout: str, known: bool, seed: int) -> None:
    """Five blocks, the last one short; three stages, the last one short; units that don't divide by the CTAs."""
    rows, columns = (290, 330) if size <= 64 else (130, 330)
    weight = Weight(packed("trained", (rows, columns), layout), columns, layout=layout_number(layout) if known else ANY)
    Product([weight], tokens(size - 1 if seed % 2 else size, columns), config(size), seed=seed).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (2, 7), (63, 63), (64, 64), (65, 65), (16, 127), (130, 128), (129, 129), (7, 200), (66, 1500)],
    ids=str,
)
def test_shapes(shape: tuple[int, int], layout: str) -> None:
    """One stage; fewer stages than slots; more; tails of rows and columns."""
    rows, columns = shape
    name = "any bits" if layout == "raw" else "trained"
    weight = Weight(maybe_packed(name, shape, layout), columns, bias(rows))
    Product([weight], tokens(3, columns), config(8)).check()


def maybe_packed(name: str, shape: tuple[int, int], layout: str) -> np.ndarray:
    """Small matrices become raw, whatever is asked for."""
    return pack_quietly(torch.from_numpy(content(name, shape).view(np.int16)).view(torch.bfloat16), layout).numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
def test_numbers_of_tokens(count: int, layout: str) -> None:
    """None, one, a tile of them, one more: several tiles of tokens."""
    weight = Weight(packed("trained", (70, 200), layout), 200, bias(70))
    product = Product([weight], tokens(count, 200), config(8))
    product.check()
    if count == 0:
        assert product.device.launched == []


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_contents(layout: str, name: str) -> None:
    """Infinities, NaNs, subnormals, zero rows, raw stages, patches: whatever the packer makes of them."""
    weight = Weight(maybe_packed(name, (64, 256), layout), 256)
    Product([weight], tokens(5, 256), config(8), multiprocessors=2, seed=1).check()


def trained_weights() -> np.ndarray:
    """uint16 [70, 768]: rows of all-mpnet-base-v2's encoder.layer.5.intermediate.dense (Apache-2.0), cast to BF16."""
    return np.load(Path(__file__).parent / "trained.npz")["weight"]


def check_kernel(bits: np.ndarray, layout: str, size: int, known: bool, seed: int) -> None:
    data = pack(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), layout).numpy()
    rows, columns = bits.shape
    weight = Weight(data, columns, bias(rows, seed), layout_number(layout) if known else ANY)
    Product([weight], tokens(min(size, 67) - seed, columns, seed), config(size), seed=seed).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [8, 64])
def test_trained_weights(layout: str, size: int) -> None:
    check_kernel(trained_weights(), layout, size, known=True, seed=2)


HOSTILE = {
    "raw": ("any bits", "specials"),
    "huffman": ("half noise", "specials", "zero rows", "patched", "some noise", "constant rows"),
    "nibble": ("zero rows", "patched", "few outsiders"),
}


def hostile_weights(layout: str, seed: int) -> np.ndarray:
    """A block of each kind that the layout takes, the last one short: NaNs, patches, raw stages, zero rows."""
    return np.concatenate([content(name, (64, 330), seed) for name in HOSTILE[layout]])[:-3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hostile_weights(layout: str) -> None:
    check_kernel(hostile_weights(layout, 0), layout, 16, known=True, seed=1)


@slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("known", [True, False], ids=["known", "any"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_with_trained_and_with_hostile_weights(size: int, layout: str, known: bool, seed: int) -> None:
    check_kernel(trained_weights()[:67], layout, size, known, seed)
    check_kernel(hostile_weights(layout, seed), layout, size, known, seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("float_output", "with_bias", "x_gap", "y_gap", "rows"),
    [(True, True, 8, 0, 64), (True, False, 0, 3, 67), (False, True, 16, 1, 65), (False, False, 8, 62, 66)],
)
def test_options(layout: str, float_output: bool, with_bias: bool, x_gap: int, y_gap: int, rows: int) -> None:
    """Outputs of both types, with a bias or without, strided x and y, rows of y that are aligned or not."""
    weight = Weight(maybe_packed("trained", (rows, 300), layout), 300, bias(rows) if with_bias else None, gap=y_gap)
    Product([weight], tokens(5, 300), config(8), float_output=float_output, gap=x_gap).check()


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_ctas(layout: str, multiprocessors: int) -> None:
    """One that does everything; blocks cut between two, and among several; more than there are units."""
    shape = (130, 2600)
    weight = Weight(packed(NAMES[layout], shape, layout), shape[1], bias(130))
    product = Product([weight], tokens(2, shape[1]), config(8), multiprocessors=multiprocessors, float_output=True)
    product.check()


@pytest.mark.parametrize("stages", [8, 11, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_of_any_length(layout: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header says it, not the shape."""
    for module in (reference, reference_tiles):
        monkeypatch.setattr(module, "segment_stages", lambda n, k: stages)
    data = reference.pack(content("trained", (70, 2900), seed=2), layout)
    assert reference.parse_header(data).segment_stages == stages
    Product([Weight(data, 2900)], tokens(2, 2900), config(8), multiprocessors=2).check()


def full_of_patches() -> np.ndarray:
    """All 128 registers of k-step 0 in each warp, so the first and the last lane, and a few in the last k-step."""
    bits = content("trained", (64, 2048), seed=5)
    rng = np.random.default_rng(0)
    exponents = np.where(rng.integers(0, 2, (64, 16)), 0, 140).astype(np.uint16)
    exponents[:, ::2] = rng.integers(40, 80, (64, 8), np.uint16)
    bits[:, :16] = exponents << 7 | rng.integers(0, 128, (64, 16), np.uint16) * (exponents != 0)
    bits[:, 16:128] = 0x3C23  # no patches of their own
    bits[15, 2046:] = bits[48, 2046:] = 0x4FC1
    return bits


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_as_many_patches_as_a_stage_can_hold(layout: str) -> None:
    data = pack(torch.from_numpy(full_of_patches().view(np.int16)).view(torch.bfloat16), layout).numpy()
    patches = [[int(header) >> 24 for header in stage[:16].view("<u4")] for stage in stages_of(data)]
    assert patches[0] == [128] * 4 and sum(patches[15]) > 0
    Product([Weight(data, 2048)], tokens(3, 2048), config(8), multiprocessors=2).check()


def with_patches(counts: list[list[int]]) -> np.ndarray:
    """64 rows of weights without patches, but for so many registers of each stage and warp, anywhere in them."""
    bits = np.full((64, 128 * len(counts)), 0x3C23, np.uint16)
    rng = np.random.default_rng(7)
    for stage, warps in enumerate(counts):
        for warp, count in enumerate(warps):
            rows, pairs = np.divmod(rng.choice(16 * 64, count, replace=False), 64)
            for half in (0, 1):  # pairs of exponents of which none is seen often
                exponents = rng.integers(20, 220, count).astype(np.uint16)
                bits[16 * warp + rows, 128 * stage + 2 * pairs + half] = exponents << 7 | 0x8011
    return bits


def test_numbers_of_patches() -> None:
    """As many as a warp's lanes hold, one more and less, and fewer than there are k-steps."""
    counts = [[31, 32, 33, 64], [0, 1, 5, 127], [30, 12, 0, 8], [31, 31, 31, 31]]
    data = pack(torch.from_numpy(with_patches(counts).view(np.int16)).view(torch.bfloat16), "huffman").numpy()
    assert [[int(header) >> 24 for header in stage[:16].view("<u4")] for stage in stages_of(data)] == counts
    Product([Weight(data, 512)], tokens(3, 512), config(8), multiprocessors=1).check()


def test_raw_stages_among_others() -> None:
    data = packed("half noise", (64, 640), "huffman", seed=1)
    raw = [bool(stage[:4].view("<u4")[0] >> 14 & 1) for stage in stages_of(data)]
    assert any(raw) and not all(raw)
    Product([Weight(data, 640)], tokens(3, 640), config(8)).check()
    Product([Weight(data, 640)], tokens(3, 640), config(256), float_output=True).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_activations(layout: str) -> None:
    """Infinities, NaNs, subnormals and the largest numbers, each beside usual rows, which don't notice."""
    x = tokens(8, 200)
    for row, special in enumerate((0x7F80, 0x7FC1, 0x0001, 0x7F7F, 0x8000, 0xFF80)):
        x[row + 1, 7 + row :: 31] = special
    data = packed("trained", (66, 200), layout)
    (y,) = Product([Weight(data, 200)], x, config(8), float_output=True).check()
    assert np.isfinite(y[0]).all() and np.isfinite(y[7]).all() and np.isnan(y[2]).all()
