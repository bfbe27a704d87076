"""unpack on the device: the same weights as on a CPU, for every layout and every kind of shape and content."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_reading import ANY, Loaded, layout_number, pack
from native_module import native
from reference_cases import CONTENTS, content, stages_of
from samples import LAYOUTS, assert_same_bits, weight
from torch import Tensor

from unweight_ext import reference, reference_tiles
from unweight_ext.packed import info, pack_quietly

# One stage; fewer stages than the ring has slots; tails of rows and of columns; rows of 16, 4 and 2 bytes alignment;
# several segments.
SHAPES = [(1, 1), (1, 7), (7, 1), (2, 128), (64, 128), (63, 250), (65, 129), (17, 648), (3, 4224)]
pytestmark = pytest.mark.usefixtures("every_architecture")
SEEDS = 2  # a case, of the scheduler


def bfloat16(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def check(packed: Tensor, columns: int, layout: int = ANY, seed: int = 0) -> None:
    """Under several orders of warps and copies."""
    expected = torch.ops.unweight.unpack(packed, columns, torch.bfloat16)
    for order in range(SEEDS):
        assert_same_bits(Loaded(packed, columns, layout=layout, seed=SEEDS * seed + order).unpack(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(layout: str, shape: tuple[int, int]) -> None:
    packed = pack_quietly(weight("few outsiders", *shape), layout)  # small ones become raw
    check(packed, shape[1])


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_contents(layout: str, name: str) -> None:
    packed = pack_quietly(bfloat16(content(name, (64, 256), seed=3)), layout)
    check(packed, 256, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_schedules(layout: str, seed: int) -> None:
    check(pack_quietly(bfloat16(content("some noise", (130, 1100), seed)), layout), 1100, seed=seed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_caller_that_knows_the_layout_gets_a_kernel_of_its_own(layout: str) -> None:
    content_of = "any bits" if layout == "raw" else "trained"
    packed = pack(weight(content_of, 66, 520), layout)
    check(packed, 520, layout=layout_number(layout))
    plans = [
        native.plan_unpack(Loaded(packed, 520, layout=known).packed, native.RowRange(0, 66), 0, 0, 0)
        for known in (layout_number(layout), ANY)
    ]
    assert [plan.kernel for plan in plans[0]] == [f"unweight_unpack_{layout}"]
    assert [plan.kernel for plan in plans[1]] == ["unweight_unpack_tiles", "unweight_unpack_archive"]


def test_a_wrong_layout_is_told() -> None:
    packed = pack(weight("trained", 64, 256), "nibble")
    for known in ("raw", "huffman", "archive"):
        with pytest.raises(native.Error, match=f"^layout: {known}, but matrix 0 is nibble"):
            Loaded(packed, 256, layout=layout_number(known)).unpack()


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_no_conflicts_and_no_byte_twice(layout: str, every_architecture: str) -> None:
    packed = pack(weight("any bits" if layout == "raw" else "few outsiders", 64, 512), layout)
    loaded = Loaded(packed, 512, layout=layout_number(layout))
    loaded.unpack()
    counters = loaded.device.machine.counters
    conflicts = {line: traffic for line, traffic in counters.shared.items() if traffic.wavefronts > traffic.least}
    assert counters.shared and not conflicts
    used, data = (int(packed.numpy().reshape(-1)[at : at + 8].view("<u8")[0]) for at in (40, 64))
    assert counters.bulk_loaded == (used - data if every_architecture == "sm_90a" else 0)
    (stores,) = (traffic for traffic in counters.stores.values() if traffic.used > 1024)
    assert stores.used == 32 * stores.sectors == 2 * 64 * 512


def warp_patches(packed: Tensor, stage: int) -> list[int]:
    return [int(header) >> 24 for header in stages_of(packed.numpy())[stage][:16].view("<u4")]


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_as_many_patches_as_a_stage_can_hold(layout: str) -> None:
    """All 128 registers of k-step 0 in each warp, so the first and the last lane, and a few in the last k-step."""
    bits = content("trained", (64, 2048), seed=5)
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, (64, 16), np.uint16) << 15
    # Pairs that are rare, but can be scaled.
    exponents = np.where(rng.integers(0, 2, (64, 16)), 0, 255).astype(np.uint16)
    exponents[:, ::2] = rng.integers(40, 80, (64, 8), np.uint16)
    bits[:, :16] = signs | exponents << 7 | rng.integers(0, 128, (64, 16), np.uint16) * (exponents != 0)
    bits[:, 16:128] = 0x3C23  # no patches of their own
    bits[15, 2046:] = bits[48, 2046:] = 0x7FC1
    packed = pack(bfloat16(bits), layout)
    assert warp_patches(packed, 0) == [128] * 4
    assert sum(warp_patches(packed, 15)) > 0
    check(packed, 2048)


def test_archive_patches() -> None:
    """Set after everything is decoded, by all warps."""
    packed = pack(bfloat16(content("half noise", (100, 257), seed=7)), "archive")
    assert info(packed).patches > 128
    for seed in range(2):
        check(packed, 257, seed=seed)


def test_raw_stages_among_others() -> None:
    bits = content("half noise", (64, 640), seed=1)
    packed = pack(bfloat16(bits), "huffman")
    raw = [bool(stage[:4].view("<u4")[0] >> 14 & 1) for stage in stages_of(packed.numpy())]
    assert any(raw) and not all(raw)
    check(packed, 640)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacks(layout: str) -> None:
    weights = torch.stack([weight("any bits" if layout == "raw" else "zero rows", 70, 132, seed) for seed in range(3)])
    packed = pack(weights, layout, stacked=True)
    assert_same_bits(Loaded(packed, 132).unpack(), weights)
    assert_same_bits(Loaded(packed[1], 132).unpack(), weights[1])


@pytest.mark.parametrize("stages", [8, 32])
def test_a_segment_may_have_another_length_than_the_shape_says(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes follows the header."""
    for module in (reference, reference_tiles):
        monkeypatch.setattr(module, "segment_stages", lambda n, k: stages)
    packed = reference.pack(content("some noise", (5, 3000), seed=2), "huffman")
    assert reference.parse_header(packed).segment_stages == stages != native.segment_stages(5, 3000)
    check(torch.from_numpy(packed), 3000)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bands_of_rows(layout: str) -> None:
    """As transcoding decodes: blocks at a time, every byte summed once."""
    rows, columns = 200, 132
    expected = weight("any bits" if layout == "raw" else "trained", rows, columns)
    loaded = Loaded(pack(expected, layout), columns, layout=layout_number(layout))
    group = native.group_rows(loaded.packed)
    sums = loaded.device.tensor(np.zeros(native.sums_bytes(loaded.packed) // 8, np.uint64), "sums", readonly=False)
    native.verify_headers(loaded.device, loaded.packed, sums, loaded.status)
    for first in range(0, rows, group):
        count = min(group, rows - first)
        out = loaded.room(count * columns)
        native.unpack_rows(loaded.device, loaded.packed, native.RowRange(first, count), out, sums, loaded.status)
        assert_same_bits(loaded.weights(out, count, columns), expected[first : first + count])
    native.compare_checksums(loaded.device, loaded.packed, sums, loaded.status)
    loaded.raise_damage()


def test_rows_must_be_whole_groups() -> None:
    packed = pack(weight("trained", 200, 128), "nibble")
    loaded = Loaded(packed, 128, layout=layout_number("nibble"))
    for first, count in ((1, 64), (0, 63), (64, 200), (256, 1)):
        with pytest.raises(native.Error, match="^rows: "):
            native.plan_unpack(loaded.packed, native.RowRange(first, count), 0, 0, 0)


def test_matrices_of_more_than_two_billion_weights_have_work_for_all() -> None:
    rows, columns = 1 << 17, (1 << 15) + 128
    for layout, units in (("huffman", (rows // 64) * 9), ("archive", rows // 64)):
        packed = native.PackedMatrices(1 << 40, 1 << 33, rows, columns, 1, layout=layout_number(layout))
        (plan,) = native.plan_unpack(packed, native.RowRange(0, rows), 1 << 41, 0, 0)
        assert plan.grid == units


def test_what_the_host_can_refuse_it_refuses() -> None:
    good = {"address": 256, "matrix_bytes": 1 << 20, "out_features": 64, "in_features": 128}
    whole = native.RowRange(0, 64)
    for change, text in (
        ({"address": 8}, "packed: lies 8 bytes behind a multiple of 16"),
        ({"matrices": 2, "matrix_bytes": 1000}, "packed: matrices of 1000 bytes"),
        ({"matrices": 0}, "packed: no matrices"),
        ({"layout": 4}, "layout: 4, allowed are -1 to 3"),
        ({"in_features": 0}, "packed: 64 x 0 weights"),
    ):
        with pytest.raises(native.Error, match=f"^{text}"):
            native.plan_unpack(native.PackedMatrices(**{**good, **change}), whole, 0, 0, 0)
    with pytest.raises(native.Error, match="^out: lies 2 bytes"):
        native.plan_unpack(native.PackedMatrices(**good), whole, 2, 0, 0)
