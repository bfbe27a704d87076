"""bench/gpu without a GPU: steps run in real processes, kernels' checks on the CPU codec."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu import probe  # noqa: E402
from bench.gpu.record import FAILED, NOT_RUN, OK, Outcome, Record, hash_sources  # noqa: E402
from bench.gpu.runner import OUT_OF_TIME, STEP_OUT_OF_TIME, Runner  # noqa: E402
from bench.gpu.steps import STEPS  # noqa: E402

# Steps as the program has them, with units that do what kernels do on a bad day.
MODULE = """
import os, subprocess, sys, time
from pathlib import Path
from bench.gpu.step import NotRun, Step

TRACE = Path(os.environ["TRACE"])

def run(unit, device):
    with TRACE.open("a") as trace:
        trace.write(f"{unit} {os.getpid()}\\n")
    if unit == "fails" and not Path(os.environ["MENDED"]).exists():
        raise AssertionError("3 of 4 elements differ")
    if unit == "faults":
        os.abort()
    if unit == "hangs":
        subprocess.Popen(["sleep", "100"])
        time.sleep(100)
    if unit == "refuses":
        raise NotRun("no such tool here")
    print("noise on the standard output")
    return {"unit": unit, "device": device}

STEPS = (
    Step("sound", "two good units", ("first", "second"), run, 60, 60),
    Step("bad", "units that end badly", ("fails", "faults", "hangs", "refuses", "last"), run, 60, 1.5),
    Step("after", "needs what is bad", ("never",), run, 60, 60, needs=("bad",)),
    Step("follows", "needs what is sound", ("third",), run, 60, 60, needs=("sound",)),
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module of steps lies, as `odd_steps`, for this process and for workers."""
    (tmp_path / "odd_steps.py").write_text(MODULE)
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_steps", raising=False)
    return tmp_path


def run_steps(folder: Path, seconds: float = 60, module: str = "odd_steps") -> tuple[Record, list[str]]:
    out = folder / "out"
    record, said = Record(out, "cpu", "sources"), []
    Runner(module, "cpu", record, out / "log.txt", seconds, said.append).run()
    return record, said


def traced(folder: Path) -> list[list[str]]:
    """[unit, process] of everything that ran."""
    return [line.split() for line in (folder / "trace").read_text().splitlines()]


def status(record: Record, step: str, unit: str) -> tuple[str, str]:
    outcome = record.get(step, unit)
    return outcome.status, outcome.reason


def test_units_end_as_they_should(folder: Path) -> None:
    record, _ = run_steps(folder)
    assert record.get("sound", "first").figures == {"unit": "first", "device": "cpu"}
    assert status(record, "bad", "fails") == (FAILED, "AssertionError: 3 of 4 elements differ")
    assert status(record, "bad", "faults") == (
        FAILED,
        "its process ended with signal SIGABRT; log.txt has what it printed",
    )
    assert status(record, "bad", "hangs") == (FAILED, "took longer than 1.5 s and was stopped")
    assert status(record, "bad", "refuses") == (NOT_RUN, "no such tool here")
    assert status(record, "bad", "last") == (OK, "")
    assert status(record, "after", "never") == (NOT_RUN, "needs bad, which is: failed")
    assert status(record, "follows", "third") == (OK, "")
    assert "noise on the standard output" in (folder / "out" / "log.txt").read_text()


def test_a_failure_costs_the_process_and_nothing_else_does(folder: Path) -> None:
    run_steps(folder)
    process = dict(traced(folder))
    assert process["first"] == process["second"]
    assert len({process[unit] for unit in ("fails", "faults", "hangs", "refuses")}) == 4
    assert process["refuses"] == process["last"]


def groups_alive() -> set[int]:
    """Process groups with a process that hasn't ended."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends while we look
            # The name, in brackets, may hold anything; state, parent and process group follow it.
            state, _, group, *_ = file.read_text().rpartition(")")[2].split()
            found |= {int(group)} if state != "Z" else set()
    return found


def test_what_a_stopped_unit_started_is_stopped_too(folder: Path) -> None:
    run_steps(folder)
    hung = int(dict(traced(folder))["hangs"])
    assert os.getpgid(0) in groups_alive() and hung not in groups_alive()


def test_the_second_call_runs_what_is_missing(folder: Path) -> None:
    run_steps(folder)
    (folder / "trace").unlink()
    (folder / "mended").touch()
    record, said = run_steps(folder)
    assert [unit for unit, _ in traced(folder)] == ["fails", "faults", "hangs", "refuses"]
    assert status(record, "bad", "fails") == (OK, "")
    assert "sound: two good units (2 of 2 done before)" in said


def test_time_that_is_up_is_said_and_leaves_the_rest(folder: Path) -> None:
    (folder / "odd_steps.py").write_text(MODULE.replace("run, 60, 1.5)", "run, 60, 60)"))
    start = time.monotonic()
    record, _ = run_steps(folder, seconds=3)  # `hangs` takes the rest of it
    assert time.monotonic() - start < 10
    assert status(record, "bad", "hangs") == (NOT_RUN, OUT_OF_TIME)
    assert status(record, "sound", "first") == (OK, "")
    assert status(record, "bad", "last") == (NOT_RUN, OUT_OF_TIME)
    assert status(record, "follows", "third") == (NOT_RUN, OUT_OF_TIME)
    assert not [unit for unit, _ in traced(folder) if unit in ("last", "third")]


def test_a_step_has_a_time_of_its_own(folder: Path) -> None:
    text = MODULE.replace("run, 60, 1.5)", "run, 1, 60)")
    assert text != MODULE
    (folder / "odd_steps.py").write_text(text)
    record, _ = run_steps(folder)
    assert status(record, "bad", "last") == (NOT_RUN, STEP_OUT_OF_TIME)
    assert status(record, "follows", "third") == (OK, "")


def test_a_failure_stays_until_the_unit_runs_again(folder: Path) -> None:
    run_steps(folder)
    record, _ = run_steps(folder, seconds=0)
    assert status(record, "bad", "fails")[0] == FAILED
    assert status(record, "sound", "first") == (OK, "")


def test_the_file_is_whole_after_every_unit(folder: Path) -> None:
    out = folder / "out"
    seen = []

    def look(_: str) -> None:
        if (out / "results.json").exists():
            seen.append(sum(map(len, json.loads((out / "results.json").read_text())["steps"].values())))

    Runner("odd_steps", "cpu", Record(out, "cpu", "sources"), out / "log.txt", 60, look).run()
    assert seen == sorted(seen) and seen[-1] == 9
    assert not list(out.glob("*.partial"))


def test_results_of_other_sources_dont_count(tmp_path: Path) -> None:
    Record(tmp_path, "cuda", "old").put("exact", "unpack raw", Outcome(OK))
    record = Record(tmp_path, "cuda", "new")
    assert record.get("exact", "unpack raw") is None
    assert "sources 'old', now 'new'" in record.dropped
    assert Record(tmp_path, "cuda", "old").get("exact", "unpack raw") == Outcome(OK)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": 3}', '{"steps": {"a": {"b": {"color": 1}}}}'])
def test_a_file_of_somebody_else_is_dropped(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    record = Record(tmp_path, "cuda", "now")
    assert record.steps == {} and "results.json isn't what this program wrote" in record.dropped


def test_the_hash_is_of_the_sources() -> None:
    assert hash_sources() == hash_sources() != hash_sources(("csrc",))


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = program(tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nothing run: no GPU here that torch ")
    assert not (tmp_path / "out").exists()


FOUND = {"torch": "2.13.0+cu130", "cuda": "13.0", "available": True, "name": "NVIDIA H200", "capability": [9, 0]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"torch": "2.10.0a0+git1234"}, ""),
        ({"torch": "2.9.1"}, "torch 2.9.1 is older than 2.10"),
        ({"available": False, "cuda": None}, "no GPU here that torch 2.13.0+cu130 (built without CUDA) can use"),
        ({"available": False}, "no GPU here that torch 2.13.0+cu130 (built for CUDA 13.0) can use"),
        (
            {"name": "NVIDIA B200", "capability": [10, 0]},
            "NVIDIA B200 has compute capability 10.0, the kernels need Hopper's 9.0",
        ),
    ],
)
def test_what_is_in_the_way_of_a_run(change: dict, why: str) -> None:
    assert probe.obstacle({**FOUND, **change}) == why


def test_a_torch_that_doesnt_load_is_said() -> None:
    assert "No module named 'torch'" in probe.obstacle({"error": "ModuleNotFoundError: No module named 'torch'"})


def test_the_whole_program(folder: Path) -> None:
    """With failures: exit 1, all of them named. All mended or left out: exit 0 would follow."""
    done = program(folder / "out", "--device", "cpu", "--steps", "odd_steps", "--seconds", 60)
    assert done.returncode == 1, done.stderr
    assert "not run: bad (refuses): no such tool here" in done.stdout
    assert "not run: after (all of it): needs bad, which is: failed" in done.stdout
    assert "units: 4 ok, 3 failed, 2 not run" in done.stdout
    text = (folder / "out" / "report.md").read_text()
    assert "| bad | hangs | took longer than 1.5 s and was stopped |" in text
    assert "- bad (refuses): no such tool here" in text
    assert "No picture: nothing was timed." in text


def test_the_whole_program_without_failure(folder: Path) -> None:
    text = MODULE.replace('"fails", "faults", "hangs", "refuses", "last"', '"refuses", "last"')
    (folder / "odd_steps.py").write_text(text)
    done = program(folder / "out", "--device", "cpu", "--steps", "odd_steps")
    assert done.returncode == 0, done.stderr
    assert "not run: after (all of it): needs bad, which is: not run" in done.stdout


REAL = """
from dataclasses import replace
from bench.gpu import environment, exact, sanitizer, thunderkittens, timing

TIMED = ("unpack nibble 128x512", "embedding huffman 128x512 16")
STEPS = (
    environment.STEP,
    replace(exact.STEP, units=("unpack nibble", "graph nibble"), needs=()),
    replace(timing.STEP, units=TIMED, needs=()),
    replace(timing.PEER_STEP, units=("copy 128x512",)),
    replace(sanitizer.STEP, units=("memcheck",), needs=()),
    thunderkittens.STEP,
)
"""


def test_the_programs_own_steps_in_workers(folder: Path) -> None:
    """What can be run on a CPU is, up to the picture; the rest says why not."""
    (folder / "real_steps.py").write_text(REAL)
    done = program(folder / "out", "--device", "cpu", "--steps", "real_steps")
    assert done.returncode == 0, done.stdout + (folder / "out" / "log.txt").read_text()
    assert "units: 5 ok, 0 failed, 3 not run" in done.stdout
    text = (folder / "out" / "report.md").read_text()
    assert "| unpack nibble | 143 cases |" in text
    assert "| unpack nibble 128x512 | 1" in text and "| copy 128x512 |" in text and "![rates](rates.png)" in text
    assert "- exact (graph nibble): a CPU has no graphs" in text
    assert "- sanitizer (all of it): compute-sanitizer looks at GPUs" in text
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["log.txt", "rates.png", "report.md", "results.json"]


def test_too_little_time_is_an_error(tmp_path: Path) -> None:
    done = program(tmp_path, "--seconds", 5)
    assert done.returncode == 2 and "--seconds 5: expected more than 15" in done.stderr


def test_steps_fit_into_a_call() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    for position, step in enumerate(STEPS):
        assert set(step.needs) <= set(names[:position]), "a step needs one that comes later"
        assert len(set(step.units)) == len(step.units)
        assert 0 < step.unit_seconds <= step.seconds <= 450
