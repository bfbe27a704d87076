"""The operators for CUDA tensors from end to end, on the interpreter: see tests/simulated_cases.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import simulated_cases

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import native_build
from native_build import ROOT


@pytest.fixture(scope="module")
def library() -> Path:
    file = ROOT / "build" / "simulated" / "simulated_gpu.so"
    native_build.build_extension(file, gpu=ROOT / "tests" / "_simulated" / "device.cpp")
    return file


@pytest.mark.parametrize("case", [case.__name__ for case in simulated_cases.CASES])
def test_operators_for_cuda_tensors(case: str, library: Path) -> None:
    command = [sys.executable, simulated_cases.__file__, str(library), case]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok"), done.stdout + done.stderr
