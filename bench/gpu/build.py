"""Compiles the extension in this clone, with the CUDA kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from .record import ROOT
from .step import Step


def run(unit: str, device: str) -> dict:
    """Builds into the source tree. On a CPU the kernels are left as UNWEIGHT_CUDA says, or as nvcc allows."""
    environment = {**os.environ, **({"UNWEIGHT_CUDA": "1"} if device == "cuda" else {})}
    start = time.perf_counter()
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"the build failed with status {done.returncode}; its last lines:\n{done.stdout[-2000:]}")
    seconds = time.perf_counter() - start
    loads = subprocess.run([sys.executable, "-c", "import unweight_ext.ops"], cwd=ROOT, capture_output=True, text=True)
    if loads.returncode:
        raise RuntimeError(f"the extension was built and doesn't load: {loads.stderr.strip().splitlines()[-1]}")
    return {"build_seconds": round(seconds, 1)}


STEP = Step("build", "compiles the extension with its CUDA kernels", ("extension",), run, 240, 240)
