"""bench/products.py, and the steps of bench/gpu for products, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench.products as table  # noqa: E402
from bench.gpu import bars, product_times, products  # noqa: E402
from bench.gpu.record import OK, Outcome, Record  # noqa: E402
from bench.gpu.report import Report  # noqa: E402
from bench.gpu.step import NotRun  # noqa: E402
from bench.gpu.steps import STEPS  # noqa: E402
from bench.model import GPUS  # noqa: E402


@pytest.fixture(scope="module")
def rows() -> list[table.Row]:
    return list(table.rows())


def test_every_product_is_predicted(rows: list[table.Row]) -> None:
    assert len(rows) == len(table.LAYERS) * len(table.LAYOUTS) * len(GPUS) * (len(table.FEW) + len(table.MANY))
    assert {(row.layer.model, row.layer.name) for row in rows} == {(x.model, x.name) for x in table.LAYERS}
    for row in rows:
        assert (row.holds is None) == (row.tokens > 64)
        assert row.prediction.ratio > 1 - 1e-9 and row.unhinted.ratio > 1
        assert row.hinted == (not row.layer.experts and len(row.layer.shapes) == 1 and row.tokens <= 64)
        assert row.for_json()["microseconds"] == row.prediction.microseconds


def test_tables_say_where_a_bar_is_missed(rows: list[table.Row]) -> None:
    lines = table.few_table(rows).splitlines()
    assert len(lines) == 2 + len(table.LAYERS) * len(table.LAYOUTS) * len(GPUS)
    missed = sum(any(not row.holds for row in members) for members in table.grouped(rows, table.FEW))
    assert sum("**missed** at " in line for line in lines) == missed > 0
    held = sum(row.holds is True for row in rows)
    assert f"within their bars: {held} as the kernels are" in table.summary(rows)
    for text in (table.few_table(rows), table.parts_table(rows), table.many_table(rows)):
        assert len({line.count("|") for line in text.splitlines()}) == 1


def test_parts_add_up(rows: list[table.Row]) -> None:
    for line in table.parts_table(rows).splitlines()[2:]:
        *parts, total, _ = map(float, line.strip("| ").split(" | ")[3:])
        assert sum(parts) == pytest.approx(total, abs=0.05)


def test_experts_that_are_hit_are_read() -> None:
    layer = next(x for x in table.LAYERS if x.experts and x.name == "gate+up")
    assert layer.product(1).weights == 2 * 2 * 14336 * 4096
    assert layer.product(16).weights == 2 * 8 * 14336 * 4096
    assert layer.product(16).tokens == (4,) * 8 and layer.product(1).tokens == (1, 1, 0, 0, 0, 0, 0, 0)


def test_the_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert table.main(["--json", "--plot", str(tmp_path / "p.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] is True and found["assumed"]["dependent_launch"] > 0 and len(found["rows"]) == 640
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_what_the_command_prints(rows: list[table.Row]) -> None:
    """bench/RESULTS.md: run the command again when this fails."""
    text = (ROOT / "bench" / "RESULTS.md").read_text()
    for part in (table.summary(rows), table.few_table(rows), table.parts_table(rows), table.many_table(rows)):
        assert part in text


# Steps for a GPU.


@pytest.mark.parametrize(
    "unit", [u for u in products.CHECKS if not u.startswith(("config", "graph", "streams", "tuned"))]
)
def test_checks_hold_on_the_cpu(unit: str) -> None:
    assert products.run_check(unit, "cpu") == {"cases": 1}


@pytest.mark.parametrize("unit", ["config huffman 16", "graph raw", "streams nibble", "tuned raw"])
def test_what_needs_a_gpu_says_so(unit: str) -> None:
    with pytest.raises(NotRun, match="a CPU has no"):
        products.run_check(unit, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_wrong_weight_is_found(dtype: torch.dtype) -> None:
    weight, x = products.plain_weight(64, 2120), products.random_x(3, 2120, "cpu")
    y = (x.double() @ weight.double().T).to(dtype)
    assert products.difference(y, x, weight) == ""
    wrong = weight.clone()
    wrong[5] = wrong[5].roll(1)
    y = (x.double() @ wrong.double().T).to(dtype)
    assert "results are off, first (0, 5)" in products.difference(y, x, weight)


def test_a_difference_fails_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "difference", lambda *_: "off by one")
    with pytest.raises(AssertionError, match="1 rows: off by one"):
        products.run_check("rows nibble", "cpu")


def test_timed_products_are_those_of_the_table() -> None:
    for unit in product_times.TIMES:
        assert product_times.layer_of(unit) in table.LAYERS


def test_times_of_a_small_product() -> None:
    found = product_times.times_of("nibble", ((128, 256), (64, 256)), (1, 16), "cpu")
    assert found["weights"] == 192 * 256 and list(found["times"]) == ["1", "16"]
    assert all(spent["microseconds"] > 0 and spent["cublas"] > 0 for spent in found["times"].values())


def test_times_of_experts() -> None:
    found = product_times.times_of_experts("huffman", 128, 256, {1: (1, 1, 0), 4: (3, 3, 2)}, "cpu")
    one, four = found["times"]["1"], found["times"]["4"]
    assert one["packed_bytes"] == found["packed_bytes"] * 2 // 3 and four["packed_bytes"] == found["packed_bytes"]
    assert all(spent["microseconds"] > 0 and spent["cublas"] > 0 for spent in (one, four))


@pytest.mark.parametrize(
    ("layout", "product", "tokens", "speed", "expected"),
    [
        ("huffman", "gate", 16, 1.40, "PASS (≥ 1.40)"),
        ("huffman", "down", 1, 1.39, "MISS (≥ 1.40)"),
        ("nibble", "gate+up", 16, 1.28, "PASS (≥ 1.28)"),
        ("nibble", "gate", 64, 1.2, "MISS (≥ 1.25)"),
        ("nibble", "o", 128, 0.97, "PASS (≥ 0.97)"),
        ("huffman", "QKV", 1024, 0.84, "MISS (≥ 0.85)"),
        ("huffman", "QKV", 16, 0.5, ""),
        ("nibble", "gate", 32, 0.5, ""),
    ],
)
def test_verdicts(layout: str, product: str, tokens: int, speed: float, expected: str) -> None:
    assert bars.verdict(layout, product, tokens, speed) == expected


def test_the_report_has_measured_beside_predicted(tmp_path: Path) -> None:
    record = Record(tmp_path, "cuda", "sources")
    record.put("environment", "machine", Outcome(OK, figures={"gpu": {"name": "NVIDIA H200"}}))
    few = {"microseconds": 25.0, "hinted": 20.0, "cublas": 30.0}
    times = {"16": few, "128": {"microseconds": 30.0, "cublas": 24.0}}
    figures = {"weights": 14336 * 4096, "packed_bytes": 80_000_000, "times": times}
    record.put("product times", "huffman Llama-3.1-8B gate", Outcome(OK, figures=figures))
    record.put("products", "rows raw", Outcome(OK, figures={"cases": 1}))
    text = Report(record, STEPS).markdown("")
    row = table.row_of(product_times.layer_of("huffman Llama-3.1-8B gate"), "H200", "huffman", 16)
    predicted = f"{row.prediction.microseconds:.1f}"
    expected = f"| Llama-3.1-8B gate | huffman | 16 | {predicted} | 25.0 | 20.0 | 1.20 | 30.0 | 1.50 | PASS"
    assert expected in text and "| 30.0 | 30.0 | 1.80 | 24.0 | 0.80 | MISS (≥ 0.85) |" in text
    assert "| products: rows raw | right |" in text
