"""The instructions that predictions are made of are those of the kernels."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_cubin  # noqa: E402
import native_build  # noqa: E402
import sass  # noqa: E402

from unweight_ext.tuning.costs import OPERATIONS, TILED  # noqa: E402

A_LANES_WEIGHTS = 8  # of one wgmma
TENSOR = "HGMMA"


@pytest.mark.slow
@pytest.mark.parametrize("layout", TILED)
def test_operations_are_counted_in_sass(layout: str) -> None:
    source = ROOT / "csrc" / "cuda" / "linear" / f"linear_{layout}.cu"
    kernel = check_cubin.compile_file(native_build.find_nvcc().path, source).kernels[f"unweight_linear_{layout}_16"]
    paths = [
        path for loop in kernel.loops for path in [sass.hot_path(kernel, loop, TENSOR)] if any(map(is_tensor, path))
    ]
    path = min(paths, key=len)
    weights = A_LANES_WEIGHTS * sum(map(is_tensor, path))
    counted = Counter(sass.pipe_of(instruction) for instruction in path)
    expected = OPERATIONS[layout]
    for pipe in ("ALU", "FMA-heavy", "LSU", "XU"):
        assert counted[pipe] / weights == pytest.approx(expected[pipe], abs=0.05), pipe
    assert len(path) / weights == pytest.approx(sum(expected.values()), abs=0.1)


def is_tensor(instruction: sass.Instruction) -> bool:
    return instruction.base == TENSOR
