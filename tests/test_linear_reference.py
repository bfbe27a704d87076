"""The stepped reference of the fused product, checked by what doesn't know it: float64, and products with one term."""

from __future__ import annotations

import linear_reference as stepped
import numpy as np
import pytest
import torch
from cuda_reading import pack
from samples import from_float, weight

M, N, K = 5, 70, 2100


def tokens(rows: int = M, columns: int = K, scale: float = 1.0) -> np.ndarray:
    return from_float(np.random.default_rng(2).standard_normal((rows, columns)) * scale)


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
@pytest.mark.parametrize("cuts", [[(0, 2)], [(0, 1), (1, 2)]], ids=str)
def test_near_float64(layout: str, cuts: list[stepped.Chain]) -> None:
    original = weight("any bits" if layout == "raw" else "trained", N, K)
    if layout == "raw":  # finite ones
        original = torch.where(original.isfinite() & (original.abs() < 1e30), original, 1.5).bfloat16()
    weights = stepped.read_weights(pack(original, layout).numpy())
    assert weights.segments == 2 and weights.blocks == 2
    x = tokens()
    got = stepped.multiply(weights, x, [cuts, cuts])
    w, xf = original.double().numpy(), stepped.to_float(x)
    # A step cuts 17 terms to 2^-25 of the largest and the sum to 2^-23 of itself.
    allowed = K // 16 * 2.0**-20 * (abs(xf) @ abs(w).T)
    error = abs(got - xf @ w.T)
    assert got.dtype == np.float32 and (error <= allowed).all()
    assert error.max() > 0 or layout == "raw", "FP32 sums can't all be exact"


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
def test_times_the_identity(layout: str) -> None:
    """One term an output: the weights themselves, but for the sign of zero."""
    original = weight("any bits" if layout == "raw" else "few outsiders", 66, 200)
    original = torch.where(original.isfinite(), original, 0.25).bfloat16()
    weights = stepped.read_weights(pack(original, layout).numpy())
    identity = from_float(np.eye(200))
    got = stepped.finish(stepped.multiply(weights, identity, stepped.one_chain(weights)), None, float_output=False)
    expected = original.T.contiguous().view(torch.int16).numpy().view(np.uint16)
    assert (got == np.where(expected == 0x8000, 0, expected)).all()


def test_the_scale_of_nibble_commutes() -> None:
    """Unless it leaves the range: sums of scaled weights that are too large for FP32 are cut to it."""
    original = (weight("trained", 64, 512).float() * 2.0**-30).bfloat16()
    by_layout = {layout: stepped.read_weights(pack(original, layout).numpy()) for layout in ("huffman", "nibble")}
    assert by_layout["nibble"].scale > 20 and by_layout["huffman"].scale == 0
    for scale, same in ((1.0, True), (2.0**-40, True), (2.0**125, False)):
        huffman, nibble = (
            stepped.multiply(weights, tokens(columns=512, scale=scale), stepped.one_chain(weights))
            for weights in by_layout.values()
        )
        assert bool((huffman.view(np.uint32) == nibble.view(np.uint32)).all()) == same
        assert np.isfinite(huffman).all()


def test_the_order_of_chains_counts() -> None:
    weights = stepped.read_weights(pack(weight("trained", 64, 3072), "huffman").numpy())
    assert weights.segments == 2
    whole, parts = (stepped.multiply(weights, tokens(columns=3072), [cuts]) for cuts in ([(0, 2)], [(0, 1), (1, 2)]))
    assert (whole != parts).any()
    with pytest.raises(AssertionError):
        stepped.multiply(weights, tokens(columns=3072), [[(1, 2), (0, 1)]])


def test_rounding() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -np.inf, np.nan, -0.0, 3.4e38, 1e-40])
    got = stepped.to_bfloat16(values.astype(np.float32))
    ours = torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (got == np.where(np.isnan(values), 0x7FFF, ours)).all()
    sums = np.float32([[1.5, -1.0]])
    assert (stepped.finish(sums, from_float(np.array([0.5, 1.0])), True) == [[2.0, 0.0]]).all()


def test_work_is_shared_at_the_nearest_borders() -> None:
    assert stepped.share_work([1] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert stepped.share_work([8, 8, 8, 2], 3) == [0, 1, 2, 2]
    assert stepped.share_work([3, 28, 1], 2) == [0, 1, 1]
    assert stepped.share_work([2, 2, 2], 2) == [0, 0, 1], "equally near: the later border"


def test_chains_are_what_a_cta_has_of_a_block() -> None:
    weights = stepped.Weights(np.zeros((130, 5 * 128)), 0, 2 * 128)  # three blocks, segments of 2, 2 and 1 stages
    chains = stepped.cut_chains([[weights]], [(0, 9)], 8, 2, multiprocessors=9, chunks=4)
    # Of 30 stages, in this order: blocks 0 and 1 (20 of both tiles) and block 2 (10); borders at 8, 15 and 22 or 23.
    assert chains[0, 0, 0, 0] == [(0, 2), (2, 3)] and chains[0, 0, 0, 2] == [(0, 3)]
    assert {first for _, _, first, _ in chains} == {0, 8} and len(chains) == 6


def test_tiles_are_cut_by_themselves() -> None:
    weights = stepped.Weights(np.zeros((130, 5 * 128)), 0, 2 * 128)  # 15 stages
    assert [stepped.chunks_of_tile(15, 2, gpu) for gpu in (1, 2, 4, 5, 8, 100)] == [1, 2, 4, 4, 8, 8]
    alone = stepped.cut_chains([[weights]], [(0, 1)], 8, 2, multiprocessors=4)
    several = stepped.cut_chains([[weights] * 3], [(0, 1), (1, 1), (1, 20)], 8, 2, multiprocessors=4)
    assert len(several) == 3 * 4 and len(alone) == 3
    for (_, _, _, block), chains in several.items():
        assert chains == alone[0, 0, 0, block]
    assert any(len(chains) > 1 for chains in alone.values())
