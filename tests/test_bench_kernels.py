"""bench/model.py and bench/kernels.py: the bounds, and where their numbers come from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import kernels, model, sass_places, simulated  # noqa: E402
from bench.model import GPUS, Demand, bound, budget, gpu_of  # noqa: E402

H100, H200 = GPUS["H100"], GPUS["H200"]


@pytest.mark.parametrize(
    ("bits", "gpu", "expected"),
    [
        (12.04, H100, (6.6, 6.6, 13.3)),
        (12.04, H200, (4.65, 4.65, 9.3)),
        (10.8, H100, (5.9, 5.9, 11.8)),
        (10.8, H200, (4.1, 4.1, 8.3)),
    ],
)
def test_budgets_are_those_of_the_design(bits: float, gpu: model.Gpu, expected: tuple[float, ...]) -> None:
    """What a product's kernel may spend on a weight that it only reads."""
    found = budget(bits / 8, gpu)
    assert [found["ALU"], found["FMA-heavy"], found["issue"]] == pytest.approx(expected, abs=0.12)


def test_memory_rates_are_those_of_the_data_sheets() -> None:
    assert H100.hbm_gb_per_second == pytest.approx(3350, rel=0.01)
    assert H200.hbm_gb_per_second == pytest.approx(4800, rel=0.01)


@pytest.mark.parametrize(
    ("demand", "limiter", "clocks"),
    [
        (Demand(3.5), "HBM", 3.5 / 14.5),
        (Demand(1.5, shared_wavefronts=0.2), "shared memory", 0.2),
        (Demand(1.5, operations={"ALU": 16.0, "LSU": 2.0}), "ALU", 0.25),
        (Demand(1.5, operations={"ALU": 4.0, "LSU": 16.0}), "LSU", 0.5),
        (Demand(1.5, operations={"control": 64.0}), "issue", 0.5),
        (Demand(1.5, operations={"ALU": 8.0, "FMA-heavy": 8.0, "FMA": 8.0, "XU": 8.0}), "XU", 0.5),
    ],
)
def test_the_slowest_part_is_the_bound(demand: Demand, limiter: str, clocks: float) -> None:
    found = bound(demand, H100)
    assert found.limiter == limiter and found.clocks_per_weight == pytest.approx(clocks)


def test_a_bound_in_other_units() -> None:
    """A copy: two bytes in, two out, so BF16 at half the memory's rate."""
    copy = bound(Demand(4.0), H200)
    assert copy.bf16_gb_per_second == pytest.approx(H200.hbm_gb_per_second / 2)
    assert copy.microseconds(1 << 24) == pytest.approx((1 << 26) / H200.hbm_gb_per_second / 1e3)
    assert copy.share_of_hbm == 1
    busy = Demand(4.0, operations={"control": 128 * 4 * 4 / 20.7})  # four times as long as its bytes take
    assert bound(busy, H200).share_of_hbm == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "warps"),
    [
        (160, 64, 0, 30),  # registers: 2048 a warp, so six CTAs of five
        (160, 64, 70000, 15),  # shared memory: three CTAs
        (160, 64, 113 << 10, 10),
        (160, 64, 227 << 10, 5),
        (160, 64, 228 << 10, 0),
        (1024, 32, 0, 64),
        (1024, 65, 0, 0),
        (32, 16, 0, 32),  # no more CTAs than that
        (64, 33, 0, 48),  # pieces of 256 registers: 40 a thread, of 12 warps in each of four parts
    ],
)
def test_warps_that_an_sm_holds(threads: int, registers: int, shared_bytes: int, warps: int) -> None:
    assert model.resident_warps(threads, registers, shared_bytes) == warps


def test_what_each_warp_must_issue() -> None:
    """At the full issue rate: four instructions a clock, over so many warps."""
    operations = {"control": 320.0}
    assert bound(Demand(1.0, operations=operations), H100).instructions_per_warp(operations, 16) == pytest.approx(0.25)


def test_a_kernel_that_reads_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="hbm_bytes: 0, expected more than 0"):
        bound(Demand(0), H100)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H200", H200),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_gpus_by_the_names_they_give_themselves(name: str, gpu: model.Gpu | None) -> None:
    assert gpu_of(name) is gpu


A, B, C = (("a.cuh", 3), ("k.cu", 9)), (("a.cuh", 3), ("k.cu", 12)), (("k.cu", 10),)


def test_a_further_weight_costs_the_difference() -> None:
    small = simulated.Cost(100, 60, 200, 30, 20, 1000, {A: 100}, 160, 4096)
    large = simulated.Cost(300, 260, 700, 130, 70, 9000, {A: 300, B: 50}, 160, 4096)
    assert large.per_weight(small, 100) == simulated.Cost(2, 2, 5, 1, 0.5, 80, {A: 2, B: 0.5}, 160, 4096)
    assert (small + large).places == {A: 400, B: 50}


DISASSEMBLY = """.text.unweight_first:
\t//## File "/src/a.cuh", line 3 inlined at "/src/k.cu", line 9
\t//## File "/src/k.cu", line 9
        /*0000*/                   LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT ;
        /*0010*/                   LDS R6, [R4] ;
\t//## File "/src/k.cu", line 10
.L_x_1:
        /*0020*/                   IMAD R6, R6, R6, RZ ;
        /*0030*/                   BRA.DIV UR4, `(.L_x_3) ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_3:
        /*0060*/                   SHF.L.U32 R1, R1, 0x1, RZ ;
        /*0070*/                   BRA `(.L_x_1) ;
\t.section .nothing
.text.unweight_second:
        /*0000*/                   EXIT ;
"""


def test_instructions_have_places_and_pipes() -> None:
    """What only lanes reach that have parted (.L_x_3) is left out."""
    found = sass_places.located(DISASSEMBLY)
    pipes = [(A, "ALU"), (A, "LSU"), (C, "FMA-heavy"), (C, "control"), (C, "control"), (C, "control")]
    assert found == {"unweight_first": pipes, "unweight_second": [((), "control")]}


def test_instructions_run_as_often_as_their_place() -> None:
    found = sass_places.estimate([(A, "ALU"), (A, "ALU"), (A, "LSU"), (C, "ALU")], {A: 2.5, B: 7.0})
    assert found == sass_places.Estimate({"ALU": 5.0, "LSU": 2.5}, 0.25)


def test_places_are_named_by_what_runs_there() -> None:
    instructions = [(A, "ALU"), (C, "ALU"), (A, "LSU"), (B, "ALU")]
    assert sass_places.most_of(instructions, {A: 2.0, B: 1.0, C: 5.0}, most=2) == [(C, 5.0), (A, 4.0)]
    row = kernels.row_of("c", "k", simulated.Cost(1, places={A: 2.0, B: 1.0, C: 5.0}, threads=32), instructions, 32)
    assert kernels.places(row, 2).splitlines()[1:] == ["    5.00  k.cu:10", "    4.00  a.cuh:3 < k.cu:9"]


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (kernels.cuda_toolkit, "find_nvcc", "no nvcc 12.4 or newer"),
        (kernels.cuda_toolkit, "find_program", "nvdisasm is neither"),
        (kernels, "find_spec", "pybind11 isn't installed"),
    ],
)
def test_a_missing_tool_is_said(
    module: object, name: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(module, name, lambda *_: None)
    assert kernels.main(["unpack raw"]) == kernels.MISSING_TOOL == 3
    assert capsys.readouterr().err.startswith(f"error: {says}")


def test_the_table() -> None:
    cost = simulated.Cost(1.5, 2.0, 3.6, 0.05, 0.04, 8.0, {A: 2.0, C: 1.0}, 160, 70000)
    located = [(A, "ALU"), (C, "FMA-heavy"), (C, "LSU"), (C, "control")]
    row = kernels.row_of("unpack nibble", "unweight_unpack_nibble", cost, located, 64)
    lines = kernels.markdown([row]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    counts = "3.50 | 3.60 | 3.20 | 0.64 | 8.00 | 2.00 | 1.00 | 1.00 | 0.00 | 5.00"
    assert lines[2] == f"| unpack nibble | unpack_nibble | {counts} | 15 | 1919 | HBM | 0.04 | 2740 | HBM | 0.06 |"


def test_the_picture_has_each_part_at_its_kernels_line() -> None:
    """Also of kernels that don't use what the ones before them do."""
    costs = {
        "a": simulated.Cost(1.0, places={A: 1.0}, threads=32),
        "b": simulated.Cost(1.0, places={C: 2.0}, threads=32),
    }
    located = {"a": [(A, "ALU")], "b": [(C, "ALU"), (C, "XU")]}
    rows = [kernels.row_of("case", name, cost, located[name], 32) for name, cost in costs.items()]
    (axes,) = kernels.picture(rows).axes
    marks = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    hbm = 1 / H200.hbm_bytes
    assert marks["ALU"] == [[pytest.approx(1 / 64 / hbm), 0], [pytest.approx(2 / 64 / hbm), 1]]
    assert marks["XU"] == [[pytest.approx(2 / 16 / hbm), 1]]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["case: a", "case: b"]
    assert axes.yaxis_inverted() and marks["HBM of an H100"][0][0] == pytest.approx(20.7 / 14.5)


@pytest.mark.parametrize(
    "case", ["unpack nibble", "embedding raw", pytest.param("transcode huffman-nibble", marks=pytest.mark.slow)]
)
def test_counts_are_those_of_the_format(case: str) -> None:
    rows = {row["kernel"]: row for row in kernels.rows_of([case])}
    for row in rows.values():
        demand = row["demand"]
        # ptxas saves moves and fuses; that it keeps the places is what the estimate stands on.
        assert 0.6 < sum(demand["operations"].values()) / row["ptx_instructions"] < 1.2
        assert row["sass_without_place"] < 0.02
        assert demand["hbm_bytes"] <= 1.01 * row["l2_bytes"]
        assert set(row["bounds"]) == {"H100", "H200"}
    if case == "unpack nibble":
        # Packed bytes are read once, BF16 is written once; and all of it goes through shared memory without conflicts.
        row = rows["unweight_unpack_nibble"]
        assert 3.5 < row["demand"]["hbm_bytes"] < 3.53
        assert 64 * row["demand"]["shared_wavefronts"] > 64 * 3.5 / 128 and row["conflicts_per_64_weights"] == 0
    if case == "embedding raw":
        # A row of a stage is 4 bytes here and there: a sector of 32 has some of it and of its seven neighbours.
        assert rows["unweight_embedding_tiles"]["demand"]["hbm_bytes"] > 6
    if case == "transcode huffman-nibble":
        assert {"unweight_unpack_huffman", "unweight_count_pairs", "unweight_write_nibble"} <= set(rows)
        assert 2 < rows["unweight_count_pairs"]["demand"]["hbm_bytes"] < 2.1  # BF16 once


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "bench" / "kernels.py",
        "--json",
        "--plot",
        tmp_path / "kernels.png",
        "unpack raw",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["predicted"] is True and printed["command"].endswith(" 'unpack raw'")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")
    (row,) = [row for row in printed["rows"] if row["kernel"] == "unweight_unpack_raw"]
    assert Demand(**row["demand"]).hbm_bytes == pytest.approx(4, rel=0.02)


def test_an_unknown_case_is_an_error() -> None:
    done = subprocess.run([sys.executable, ROOT / "bench" / "kernels.py", "unpack zip"], capture_output=True, text=True)
    assert done.returncode == 2 and "'unpack zip': expected one of\n  unpack raw\n  verify raw\n" in done.stderr


def test_a_plot_that_has_no_folder_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench" / "kernels.py", "--plot", tmp_path / "none" / "kernels.png", "unpack raw"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith("kernels.png: there is no such folder\n")
