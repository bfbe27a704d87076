"""The predicted time of a product: unweight_ext/tuning/predict.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_module import native

from unweight_ext.tuning.costs import ASSUMED, HINTED_STAGES, PIECES_AT_ONCE, SLOTS, TILED, bits_per_weight
from unweight_ext.tuning.predict import (
    CONFIGS,
    Config,
    Product,
    best,
    candidates,
    cublas_microseconds,
    predict,
    predict_scratch,
)
from unweight_ext.tuning.rates import GPUS

LAYOUT_NUMBERS = {"raw": 0, "huffman": 1, "nibble": 2}
GATE = (14336, 4096)
SHAPES = ((4096, 4096), GATE, (4096, 14336), (28672, 8192))
LAYOUT, GPU = st.sampled_from(TILED), st.sampled_from(list(GPUS.values()))


def few(tokens: int) -> Config:
    return candidates(tokens)[0]


@pytest.mark.parametrize("layout", TILED)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_no_product_is_faster_than_its_bytes(layout: str, gpu) -> None:
    for shape in SHAPES:
        for config in CONFIGS:
            for hinted in (False, True)[: 1 + (config.tokens <= 64)]:
                found = predict(Product.of(config.tokens, shape), layout, config, gpu, hinted=hinted)
                assert found.ratio > 1 - 1e-9
                assert found.parts["loop"] + found.parts["last stage"] >= found.hbm - 1e-9
                assert found.microseconds == pytest.approx(sum(found.parts.values()))


def test_by_hand() -> None:
    """4096 x 4096 has 64 blocks of 32 stages in two segments: 128 units, one a CTA. `raw`, 8 tokens, H100."""
    product, gpu = Product.of(8, (4096, 4096)), GPUS["H100"]
    found = predict(product, "raw", few(8), gpu, chained=False)
    bytes_read = 4096 * 4096 * 16.02 / 8
    assert found.hbm == pytest.approx(bytes_read / (14.5 * 132 * 1.755e3))
    assert found.limiter == "HBM"
    # A CTA has 16 stages, where 132 SMs could have 15.5. The memory is shared, so 128 of them are as fast as 132.
    assert found.busiest == pytest.approx(16 * 132 / 2048)
    assert found.parts["loop"] + found.parts["last stage"] == pytest.approx(found.hbm + found.parts["last stage"])
    assert found.parts["launch"] == ASSUMED.launch
    assert found.parts["first reads and table"] == pytest.approx(3 * ASSUMED.hbm_latency), "header, index, stage"
    # Half of the CTAs leave a block's first half to others, at their end: 64 sums of 8 rows are written, and read. The
    # sums reach the L2, the flag is seen, the sums are read.
    together = 2 * (4 * 64 * 8) * 64 / 132 / ASSUMED.l2_bytes
    alone = 4 * 64 * 8 / ASSUMED.l2_bytes_alone
    assert found.parts["sum of pieces"] == pytest.approx(3 * ASSUMED.l2_latency + max(together, alone) / 1.755e3)
    assert found.parts["at once"] == pytest.approx(0, abs=1e-9), "nothing of it is hidden, raw has no table"
    assert found.cublas == pytest.approx(2 * 4096 * 4096 / (0.88 * 14.5 * 132 * 1.755e3))


@given(shape=st.sampled_from(SHAPES), layout=LAYOUT, gpu=GPU)
def test_more_tokens_take_no_less(shape: tuple[int, int], layout: str, gpu) -> None:
    times = [predict(Product.of(c.tokens, shape), layout, c, gpu).microseconds for c in CONFIGS if c.tokens <= 64]
    assert all(more >= 0.999999 * less for less, more in pairwise(times))


def test_every_overhead_costs() -> None:
    product, config, gpu = Product.of(16, GATE), few(16), GPUS["H200"]
    base = predict(product, "huffman", config, gpu, chained=False).microseconds
    for change in (
        {"launch": 2.0},
        {"l2_latency": 1.0},
        {"hbm_latency": 1.0},
        {"l2_bytes": 10.0},
        {"l2_bytes_alone": 10.0},
        {"store": 1.0},
        {"table_fill": 5.0},
        {"least_wgmma_clocks": 1000.0},
    ):
        assert predict(product, "huffman", config, gpu, replace(ASSUMED, **change), chained=False).microseconds > base


def test_who_asks_before_waits_less() -> None:
    product, config, gpu = Product.of(16, GATE), few(16), GPUS["H200"]

    def microseconds(assumed=ASSUMED, **how: bool) -> float:
        return predict(product, "huffman", config, gpu, assumed, **how).microseconds

    alone, plain = microseconds(chained=False), microseconds(replace(ASSUMED, prefetches=False))
    assert microseconds(hinted=True) < microseconds() < plain < alone
    assert predict(product, "huffman", config, gpu, hinted=True).parts["at once"] < 0


@pytest.mark.parametrize("layout", TILED)
def test_of_large_products_hints_leave_little_but_the_bytes(layout: str) -> None:
    found = predict(Product.of(1, (28672, 8192)), layout, few(1), GPUS["H100"], hinted=True)
    assert found.ratio < 1.03


@pytest.mark.parametrize("product", [Product((GATE,), (1, 0)), Product.of(1, GATE, GATE), Product.of(65, GATE)])
def test_some_get_no_hint(product: Product) -> None:
    with pytest.raises(ValueError, match="hinted: of a chain of products with one weight"):
        predict(product, "huffman", few(1), GPUS["H100"], hinted=True)


def test_who_has_rows_is_read_first() -> None:
    gpu, config = GPUS["H100"], few(1)
    first = [
        predict(Product((GATE,), rows), "huffman", config, gpu).parts["first reads and table"]
        for rows in ((1,), (1, 0))
    ]
    assert first[0] < first[1]


def test_what_x_takes_of_the_l2_counts_where_it_is_said_to() -> None:
    product, gpu = Product.of(64, GATE), GPUS["H200"]
    times = [
        predict(product, "nibble", few(64), gpu, replace(ASSUMED, x_takes_l2=x)).microseconds for x in (False, True)
    ]
    assert times[0] < times[1]


def test_two_weights_in_one_launch_save_a_launch() -> None:
    gpu, config = GPUS["H100"], few(16)
    one = predict(Product.of(16, GATE), "huffman", config, gpu).microseconds
    assert one < predict(Product.of(16, GATE, GATE), "huffman", config, gpu).microseconds < 2 * one


def test_experts_without_tokens_cost_nothing() -> None:
    gpu, config = GPUS["H100"], few(8)
    hit = predict(Product((GATE,), (1, 1)), "huffman", config, gpu)
    assert predict(Product((GATE,), (0, 1, 0, 0, 1, 0, 0, 0)), "huffman", config, gpu) == hit
    assert hit.hbm == 2 * predict(Product.of(1, GATE), "huffman", config, gpu).hbm


@pytest.mark.parametrize("layout", TILED)
def test_slots_are_the_kernels(layout: str) -> None:
    found = [native.linear_slots(LAYOUT_NUMBERS[layout], config.tokens, config.warpgroups) for config in CONFIGS]
    assert found == [SLOTS[layout][config.tokens] for config in CONFIGS]


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096)])
def test_what_packing_gives_is_what_is_assumed(layout: str, shape: tuple[int, int]) -> None:
    """A sixteenth of the rows, packed; segments are those of the whole weight."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bench.gpu.timing import weights_like_trained
    from unweight_ext import info, pack
    from unweight_ext.reference_tiles import segment_stages

    rows = shape[0] // 16 // 64 * 64
    packed = info(pack(weights_like_trained(rows, shape[1]), layout=layout))
    expected = bits_per_weight(layout, segment_stages(rows, shape[1]))
    assert packed.bits_per_weight == pytest.approx(expected, rel=0.03)


# What the table of csrc/cuda/linear/choice.cpp was made from.


def chosen(layout: str, shape: tuple[int, int], tokens: int) -> Config | None:
    config = native.choose(LAYOUT_NUMBERS[layout], *shape, tokens)
    return None if config < 0 else CONFIGS[config]


@pytest.mark.parametrize("layout", TILED)
def test_up_to_64_tokens_the_choice_is_the_models(layout: str) -> None:
    for tokens in range(1, 65):
        assert chosen(layout, GATE, tokens) == best(tokens, layout, [Product.of(tokens, GATE)], GPUS["H100"])


def spent(config: Config | None, product: Product, layout: str, gpu) -> float:
    if config is None:
        return predict_scratch(product, layout, gpu).microseconds
    return predict(product, layout, config, gpu).microseconds


@pytest.mark.parametrize("layout", TILED)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
@pytest.mark.parametrize("tokens", [65, 128, 200, 256, 300, 512, 1024, 2000, 4096, 16384])
def test_above_the_choice_costs_little_more_than_the_best(layout: str, gpu, tokens: int) -> None:
    products = [Product.of(tokens, shape) for shape in SHAPES]
    ours = sum(spent(chosen(layout, SHAPES[0], tokens), p, layout, gpu) for p in products)
    least = min(sum(spent(c, p, layout, gpu) for p in products) for c in (*candidates(tokens), None))
    assert ours <= 1.14 * least, "one table for memories of two speeds"


def test_cublas_takes_the_longer_of_memory_and_tensor_cores() -> None:
    gpu = GPUS["H100"]
    few_tokens, many_tokens = (cublas_microseconds(Product.of(tokens, GATE), gpu) for tokens in (1, 4096))
    assert few_tokens == cublas_microseconds(Product.of(64, GATE), gpu)
    assert many_tokens == pytest.approx(14336 * 4096 * 4096 / 2048 / 132 / 1.755e3)


@pytest.mark.parametrize("layout", TILED)
def test_the_crossover_is_the_models(layout: str) -> None:
    """Within a factor of two on both GPUs, and between what the two would have or next to it."""
    steps = list(range(256, 20480, 256))
    ours = next(tokens for tokens in steps if chosen(layout, GATE, tokens) is None)
    for gpu in GPUS.values():
        model = next(tokens for tokens in steps if best(tokens, layout, [Product.of(tokens, GATE)], gpu) is None)
        assert model / 2 <= ours <= model * 2, f"{gpu.name}: {model}"


def test_what_is_asked_for_and_read_at_once_are_the_kernels() -> None:
    folder = Path(__file__).resolve().parent.parent / "csrc/cuda/linear"
    assert f"kHintedStages = {HINTED_STAGES};" in (folder / "prefetch.cuh").read_text()
    assert "I::kN <= 16 ? 4 : I::kN <= 32 ? 3 : 1;" in (folder / "gather.cuh").read_text()
    assert PIECES_AT_ONCE == {n: 4 if n <= 16 else 3 if n <= 32 else 1 for n in SLOTS["raw"]}
