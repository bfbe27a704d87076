"""bench/fused.py: what it counts, and the bars on it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_reading import pack

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import fused  # noqa: E402
from unweight_ext.tuning.costs import OPERATIONS, PATCHES, RATES, Patches  # noqa: E402


@pytest.fixture(scope="module")
def trained() -> torch.Tensor:
    """64 rows of all-mpnet-base-v2's encoder.layer.5.intermediate.dense (Apache-2.0), cast to BF16."""
    weight = np.load(Path(__file__).parent / "trained.npz")["weight"][:64]
    return torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("layout", fused.LAYOUTS)
def test_patches_are_those_of_the_headers(layout: str, trained: torch.Tensor) -> None:
    data = pack(trained, layout).numpy()
    rates, warps = fused.patches_of([data]), 4 * 768 // 128
    patches = rates.patches + rates.crowded_patches
    assert round(patches * warps) == int(data.reshape(-1)[80:88].view("<u8")[0])
    assert rates.batches <= rates.ksteps <= patches and rates.crowded == 0
    if layout == "huffman":  # nibble's are too few
        assert rates.patches == pytest.approx(RATES[layout].patches, rel=0.35)


def test_crowded_stages_are_counted_apart() -> None:
    """All registers of a k-step in one warp of one stage: pairs that are seen once each."""
    bits = np.full((64, 512), 0x3C00, np.uint16)
    bits[:16, :16] = (np.arange(256).reshape(16, 16) % 200 + 20) << 7
    data = pack(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), "huffman").numpy()
    count = fused._warp_headers(data.reshape(-1)) >> 24
    rates = fused.patches_of([data])
    assert count[0] > Patches.MOST and not count[1:].any()
    assert (rates.crowded, rates.crowded_patches) == (1 / 16, count[0] / 16)
    assert rates.patches == rates.ksteps == rates.batches == 0


@pytest.mark.parametrize(
    ("layout", "most", "most_with_patches"), [("huffman", 5.2, 6.2), ("nibble", 2.4, 2.6)], ids=["huffman", "nibble"]
)
def test_instructions_with_the_patches_of_a_model(layout: str, most: float, most_with_patches: float) -> None:
    loop = fused.compiled_loop(layout)
    counted = loop.per_weight(layout, RATES[layout])
    hot = {pipe: count / fused.LANE_WEIGHTS for pipe, count in loop.hot.items()}
    assert sum(hot.values()) <= most and hot["ALU"] <= 2.5
    assert 0 < sum(loop.patch.values()) and sum(hot.values()) < sum(counted.values()) <= most_with_patches
    for pipe in ("ALU", "LSU"):
        assert counted[pipe] - hot[pipe] == pytest.approx(PATCHES[layout][pipe], abs=0.02), pipe
    more = sum(counted.values()) - sum(hot.values())
    assert more == pytest.approx(sum(PATCHES[layout].values()), abs=0.04)
    assert sum(hot.values()) == pytest.approx(sum(OPERATIONS[layout].values()), abs=0.05)


@pytest.mark.parametrize(("size", "most"), [(16, 2.8), (64, 3.8)])
@pytest.mark.parametrize("layout", fused.LAYOUTS)
def test_wavefronts(layout: str, size: int, most: float, trained: torch.Tensor) -> None:
    use, conflicts = fused.wavefronts(trained, layout, size)
    assert conflicts == 0
    assert use["wgmma's reads of x"] == size / 64
    assert use["consumers' look-ups"] == (1 if layout == "huffman" else 0)
    # Signs and mantissas are half a wavefront, nibble's codes a quarter.
    assert use["consumers' other loads"] >= (0.5 if layout == "huffman" else 0.75)
    assert sum(use[place] for place in fused.OF_THE_BAR) <= most
