"""What the steps of bench/gpu do, on the CPU: checks, times, what is read of other programs."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu import cold, environment, exact, prediction, sanitizer, thunderkittens, timing  # noqa: E402
from bench.gpu.step import NotRun  # noqa: E402

# The checks themselves, on the CPU.


@pytest.mark.parametrize(
    "unit", [u for u in exact.UNITS if u.startswith(("unpack", "embedding", "verify", "product", "hostile"))]
)
def test_checks_hold_on_the_cpu(unit: str) -> None:
    """Of 11 contents in 13 shapes; lookups have no stacks, and products only take the content that is like trained."""
    counts = {"embedding": 121, "product": 11}
    assert exact.run(unit, "cpu") == {"cases": counts.get(unit.split()[0], 143)}


@pytest.mark.parametrize("unit", ["transcode archive to huffman", "transcode huffman to nibble"])
def test_transcoding_holds_on_the_cpu(unit: str) -> None:
    assert exact.run(unit, "cpu") == {"cases": 143}


class Wrong(exact.Case):
    """Packed is another weight than `weight` gives: what a broken kernel would look like."""

    def packed(self, layout: str) -> torch.Tensor:
        weight = self.weight().clone()
        weight.view(torch.int16)[-1, -1] ^= 1
        return _pack(weight, layout)


def _pack(weight: torch.Tensor, layout: str) -> torch.Tensor:
    from unweight_ext.packed import pack_quietly

    return pack_quietly(weight, layout)


def test_one_wrong_bit_is_found() -> None:
    case = Wrong("trained", (65, 129))
    last = 65 * 129 - 1
    assert f"1 of {65 * 129} elements differ, first {last}: 0x" in exact.check_unpack(case, "huffman", "cpu")
    assert "torch.int64 ids: 2 of" in exact.check_embedding(case, "nibble", "cpu")


def test_wrong_bytes_of_a_transcode_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = exact.Case("trained", (65, 129))
    monkeypatch.setattr(
        exact.Case, "packed", lambda self, layout: _pack(self.weight().roll(int(layout == "nibble")), layout)
    )
    assert "elements differ" in exact.check_transcode(case, ("huffman", "nibble"), "cpu")


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = exact.Case("trained", (65, 129))
    monkeypatch.setattr(exact.Case, "packed", lambda self, layout: _pack(self.weight().roll(1), layout))
    assert "elements differ" in exact.check_product(case, "nibble", "cpu")


def test_graphs_are_not_checked_without_a_gpu() -> None:
    with pytest.raises(NotRun, match="a CPU has no graphs"):
        exact.run("graph nibble", "cpu")


def test_hostile_bytes_that_give_other_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second, the device's, call of each turn is another tensor's."""
    case, calls = exact.Case("trained", (65, 129)), []
    real = torch.ops.unweight.unpack

    class Operators:
        @staticmethod
        def unpack(packed: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
            calls.append(packed)
            return real(packed, in_features, dtype) + len(calls) % 2

    monkeypatch.setattr(torch.ops, "unweight", Operators)
    assert "elements differ" in exact.check_hostile(case, "raw", "cpu")


def test_damage_that_goes_unseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "damaged_copies", lambda packed: iter([("nothing", packed)]))
    assert (
        exact.check_verify(exact.Case("trained", (64, 128)), "nibble", "cpu") == "damaged nothing: the CPU says nothing"
    )


def test_failures_of_cases_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact.CHECKS, "unpack", lambda case, layout, device: "wrong" if case.shape == (1, 7) else "")
    with pytest.raises(AssertionError, match=r"^11 of 143 cases: trained 1x7: wrong; .*; and 8 more$"):
        exact.run("unpack raw", "cpu")


def test_an_error_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: exact.Case, layout: str, device: str) -> str:
        raise ValueError("an illegal memory access")

    monkeypatch.setitem(exact.CHECKS, "unpack", broken)
    with pytest.raises(RuntimeError, match="^trained 1x1: an illegal memory access$"):
        exact.run("unpack raw", "cpu")


# What is read of other programs.

CLEAN = "========= COMPUTE-SANITIZER\n36 operators ran\n========= ERROR SUMMARY: 0 errors\n"
RACES = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at unweight_unpack_tiled+0x5a0 in unpack_tiled.cu:120
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize("text", [CLEAN, RACES])
def test_a_clean_sanitizer_run(text: str) -> None:
    assert sanitizer.read(0, text) == {"operators": 36}


@pytest.mark.parametrize(
    ("code", "text", "error", "says"),
    [
        (99, INVALID, AssertionError, "1 findings, first: Invalid __global__ write of size 16 bytes"),
        (0, INVALID, AssertionError, "1 findings"),
        (99, "nothing to read", AssertionError, "findings"),
        (1, CLEAN + "Traceback\nRuntimeError: no GPU", RuntimeError, "status 1: RuntimeError: no GPU"),
        (0, "36 operators ran", RuntimeError, "no summary"),
        (0, CLEAN.replace("36 operators ran\n", ""), RuntimeError, "no summary"),
        (1, "========= Error: Device not supported", NotRun, "Device not supported"),
    ],
)
def test_a_sanitizer_run_that_isnt_clean(code: int, text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        sanitizer.read(code, text)


def test_the_sanitizers_program_runs_every_operator() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.sanitized", "cpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{3 * (3 * 4 + len(exact.TRANSCODES)) + 3 * 3} operators ran"


KITTENS = """--------------------  M=4096 N=4096 K=4096  --------------------
Block size: 128x256
Average kernel execution time: 181.3 us
Achieved performance: 758.1 TFLOPs
abs mean:      16.9
err mean:    0.00213
err max:     0.5
"""


def test_what_thunderkittens_prints() -> None:
    figures = thunderkittens.read(KITTENS)
    assert figures == {
        "tokens": 4096,
        "out_features": 4096,
        "in_features": 4096,
        "median": 181.3,
        "mean_error": 0.00213,
    }
    with pytest.raises(AssertionError, match=r"mean error of 16\.9"):
        thunderkittens.read(KITTENS.replace("0.00213", "16.9"))
    with pytest.raises(AssertionError, match="nan"):
        thunderkittens.read(KITTENS.replace("0.00213", "nan"))
    with pytest.raises(RuntimeError, match="no shape, time and error"):
        thunderkittens.read("CUDA error")


def test_a_missing_submodule_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thunderkittens, "GEMM", tmp_path)
    with pytest.raises(NotRun, match=r"isn't checked out \(git submodule update --init third_party/ThunderKittens\)"):
        thunderkittens.run("gemm", "cuda")


def test_linkers_find_a_driver_that_only_runs_programs(tmp_path: Path) -> None:
    """A library that is there as libcuda.so.1 alone, as drivers install it, is what -lcuda links."""
    source = tmp_path / "cuda.c"
    source.write_text("int cuInit(unsigned flags) { return flags; }\n")
    driver = tmp_path / "driver" / "libcuda.so.1"
    driver.parent.mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", driver], check=True)
    main = tmp_path / "main.c"
    main.write_text("int cuInit(unsigned); int main(void) { return cuInit(7); }\n")
    environment = thunderkittens.link_environment(driver, tmp_path / "link")
    subprocess.run(["gcc", main, "-lcuda", "-o", tmp_path / "main"], check=True, env=environment)
    done = subprocess.run([tmp_path / "main"], env={**environment, "LD_LIBRARY_PATH": str(driver.parent)})
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("print(json.dumps({'rows': sys.argv[1:]}))", {"rows": ["--json"]}),
        ("sys.exit(3)", NotRun),
        ("sys.exit(1)", RuntimeError),
    ],
)
def test_what_becomes_of_the_prediction(
    program: str, outcome: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "kernels.py").write_text(f"import json, sys\n{program}\n")
    monkeypatch.setattr(prediction, "ROOT", tmp_path)
    if isinstance(outcome, dict):
        assert prediction.run("kernels", "cpu") == outcome
    else:
        with pytest.raises(outcome, match=r"bench/kernels\.py"):
            prediction.run("kernels", "cpu")


def test_the_environment_names_versions() -> None:
    figures = environment.run("machine", "cpu")
    assert figures["torch"] == torch.__version__ and figures["python"] == sys.version.split()[0]
    assert environment.output_of("no-such-program-anywhere") is None


# Cold buffers and times.


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 28))
def test_between_two_uses_of_a_buffer_lie_three_caches_of_others(size: int, l2: int) -> None:
    copies = cold.copies_for(size, l2)
    assert (copies - 1) * size >= 3 * l2
    assert copies == 2 or (copies - 2) * size < 3 * l2, "more than needed"


def test_no_bytes_are_an_error() -> None:
    with pytest.raises(ValueError, match="bytes_read: 0"):
        cold.copies_for(0, 1 << 20)


def test_every_turn_is_measured_once() -> None:
    turns: list[int] = []
    times = cold.measure(lambda turn: (turns.append(turn), time.sleep(1e-3 * (turn == 4))), "cpu", runs=5, warm_up=2)
    assert turns == list(range(7))  # two warm up: one more than results are kept
    assert times.lowest <= times.median <= times.highest and times.highest >= 1000


def test_results_live_until_others_have_pushed_them_out_of_the_cache() -> None:
    class Result:
        pass

    alive: weakref.WeakSet[Result] = weakref.WeakSet()
    most = []

    def call(turn: int) -> Result:
        most.append(len(alive))
        alive.add(result := Result())
        return result

    cold.measure(call, "cpu", runs=5, keep=cold.results_kept(1 << 20, 1 << 20))
    assert most == [0, 1, 2, 3, *[4] * 6]


def test_kernels_of_a_call_are_summed() -> None:
    launches = [("verify", 2.0), ("unpack", 5.0), ("unpack", 7.0)] * 3
    assert cold.sums_per_call(launches, 3) == {"verify": 2.0, "unpack": 12.0}


def test_the_profiler_names_what_ran() -> None:
    """As it names kernels on a GPU; here what runs are torch's operators."""
    launches = cold.launches_of(lambda turn: torch.ones(turn).neg(), range(3, 8), "cpu")
    spent = [microseconds for name, microseconds in launches if name == "aten::neg"]
    assert len(spent) == 5 and min(spent) > 0


@pytest.mark.parametrize(
    "unit",
    [
        "unpack huffman 128x512",
        "verify nibble 128x512",
        "embedding raw 128x512 16",
        "transcode archive-huffman 128x512",
    ],
)
def test_kernels_are_timed(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 1 << 18)
    figures = timing.run(unit, "cpu")
    assert figures["weights"] == 128 * 512 and figures["packed_bytes"] > 65536
    assert 0 < figures["lowest"] <= figures["median"] <= figures["highest"]
    if "buffers" in figures:
        assert (figures["buffers"] - 1) * figures["packed_bytes"] >= 3 << 18


@pytest.mark.parametrize("unit", ["copy 128x512", "matmul 128x512 16", "embedding torch 128x512 16"])
def test_peers_are_timed(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 1 << 18)
    assert timing.run_peer(unit, "cpu")["median"] > 0


def test_timed_weights_are_like_trained_ones() -> None:
    weight = timing.weights_like_trained(512, 512)
    assert weight.shape == (512, 512) and weight.dtype == torch.bfloat16
    assert 0.0143 < weight.float().abs().median() < 0.0148  # 0.727 · 0.02 for five degrees of freedom
    assert 10.7 < 8 * _pack(timing.weights_like_trained(4096, 1024), "huffman").nbytes / 2**22 < 11


def test_ids_of_a_turn_are_not_those_of_the_next() -> None:
    turns = timing._ids(16, 1000, "cpu")
    assert len(turns) == 62 and len(set(torch.cat(turns).tolist())) == 62 * 16
