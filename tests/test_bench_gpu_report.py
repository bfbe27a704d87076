"""What bench/gpu writes of its results: report, comparison, picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu import compare, exact, picture, timing  # noqa: E402
from bench.gpu.record import FAILED, NOT_RUN, OK, Outcome, Record  # noqa: E402
from bench.gpu.report import Report  # noqa: E402
from bench.gpu.steps import STEPS  # noqa: E402

KITTENS = {"tokens": 4096, "out_features": 4096, "in_features": 4096, "median": 181.3, "mean_error": 0.002}


ROWS = [
    {"case": "unpack nibble", "kernel": "unweight_unpack", "demand": {"hbm_bytes": 3.5, "operations": {"ALU": 1.0}}},
    {"case": "unpack nibble", "kernel": "unweight_verify", "demand": {"hbm_bytes": 1.5, "operations": {"ALU": 64.0}}},
    {"case": "unpack huffman", "kernel": "unweight_unpack_huffman", "demand": {"hbm_bytes": 3.4}},
    {"case": "embedding nibble", "kernel": "unweight_embedding", "demand": {"hbm_bytes": 3.5}},
]


def filled(folder: Path, name: str = "NVIDIA H200") -> Report:
    record = Record(folder, "cuda", "abc")
    record.put("environment", "machine", Outcome(OK, figures={"torch": "2.13", "gpu": {"name": name}, "smi": None}))
    record.put("exact", "unpack raw", Outcome(FAILED, "AssertionError: 1 of 143 cases: trained 1x7:\nfirst 3"))
    record.put("exact", "unpack nibble", Outcome(OK, figures={"cases": 143}))
    record.put("sanitizer", "memcheck", Outcome(NOT_RUN, "no compute-sanitizer"))
    times = {"median": 40.0, "lowest": 39.0, "highest": 50.0}
    unpack = {
        "weights": 1 << 24,
        "bits_per_weight": 12.05,
        "kernels": {"unweight_unpack": 20.0, "unweight_verify": 80.0},
    }
    lookup = {"weights": 1 << 24, "rows": 16, "in_features": 4096, "kernels": {"unweight_embedding": 4.0, "other": 1.0}}
    huffman = {"weights": 1 << 24, "kernels": {"unweight_unpack_tiles": 20.0, "unweight_unpack_archive": 2.0}}
    record.put("timing", "unpack huffman 4096x4096", Outcome(OK, figures={**huffman, **times}))
    record.put("timing", "unpack nibble 4096x4096", Outcome(OK, figures={**unpack, **times}))
    record.put("timing", "embedding nibble 32064x4096 16", Outcome(OK, figures={**lookup, **times}))
    record.put("peers", "copy 4096x4096", Outcome(OK, figures={"weights": 1 << 24, "kernels": {}, **times}))
    record.put("prediction", "kernels", Outcome(OK, figures={"rows": ROWS}))
    record.put("thunderkittens", "gemm", Outcome(OK, figures=KITTENS))
    return Report(record, STEPS)


def test_measured_is_compared_with_the_bound(tmp_path: Path) -> None:
    tiles, unpack, verify, lookup = filled(tmp_path).comparison()
    # The operator's kernel for any layout against that of the layout.
    assert (tiles.unit, tiles.kernel) == ("unpack huffman 4096x4096", "unweight_unpack_tiles")
    assert tiles.predicted == pytest.approx((1 << 24) * 3.4 / 20.7 / 132 / 1755)
    # 16.8 M weights of 3.5 B at 20.7 B, and of 64 ALU operations at 64, a clock and SM; 132 SMs at 1.755 GHz.
    assert unpack.predicted == pytest.approx((1 << 24) * 3.5 / 20.7 / 132 / 1755)
    assert verify.predicted == pytest.approx((1 << 24) / 132 / 1755)
    assert (unpack.limiter, verify.limiter) == ("HBM", "ALU")
    assert unpack.ratio == pytest.approx(20 / unpack.predicted)
    assert lookup.predicted == pytest.approx(16 * 4096 * 3.5 / 20.7 / 132 / 1755)


def test_the_report_has_it_all(tmp_path: Path) -> None:
    text = filled(tmp_path).markdown("![rates](rates.png)")
    assert "| exact | unpack raw | AssertionError: 1 of 143 cases: trained 1x7: first 3 |" in text
    assert "- sanitizer (memcheck): no compute-sanitizer" in text
    assert "- sanitizer (racecheck, synccheck, initcheck): not reached" in text
    assert "- build (all of it): not reached" in text
    assert "| unpack nibble | 143 cases |" in text
    assert "| unpack nibble 4096x4096 | 12.05 | 40.0 | 39.0–50.0 | 100.0 | 336 |" in text
    assert "| copy 4096x4096 |  | 40.0 | 39.0–50.0 |  | 839 |" in text
    assert "| ThunderKittens 4096x4096 4096 |  | 181.3 |  |  |  |" in text
    assert "| unpack nibble 4096x4096 | unweight_unpack | 12.2 | 20.0 | 1.63 | HBM |" in text


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"])
def test_a_gpu_without_known_rates_gets_no_comparison(tmp_path: Path, name: str) -> None:
    assert f"No comparison: bench/model.py has no rates of {name}" in filled(tmp_path, name).markdown("")


def test_the_picture_shows_measured_and_predicted(tmp_path: Path) -> None:
    report = filled(tmp_path)
    measured, predicted = picture.bars(report)["unpack nibble 4096x4096"]
    assert measured == pytest.approx(2e-3 * (1 << 24) / 100)
    both = sum(c.predicted for c in report.comparison()[1:3])
    assert predicted == pytest.approx(2e-3 * (1 << 24) / both)
    assert picture.draw(report, tmp_path) == "![rates](rates.png)"
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_no_figures_no_picture(tmp_path: Path) -> None:
    assert picture.draw(Report(Record(tmp_path, "cuda", "abc"), STEPS), tmp_path) == "No picture: nothing was timed."
    assert not (tmp_path / "rates.png").exists()


def test_bars_in_texts_dont_break_tables(tmp_path: Path) -> None:
    record = Record(tmp_path, "cuda", "abc")
    record.put("build", "extension", Outcome(FAILED, "a | b"))
    assert "| build | extension | a \\| b |" in Report(record, STEPS).markdown("")


def test_units_are_named_as_predictions_are() -> None:
    assert {compare.case_of(unit) for unit in timing.KERNELS} == {
        *(f"{verb} {layout}" for verb in ("unpack", "verify", "embedding") for layout in exact.LAYOUTS),
        *("transcode archive-huffman", "transcode huffman-nibble"),
    }
