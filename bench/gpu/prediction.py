"""What bench/kernels.py predicts, from the same sources: for the comparison with what was measured."""

from __future__ import annotations

import json
import subprocess
import sys

from .record import ROOT
from .step import NotRun, Step


def run(unit: str, device: str) -> dict:
    command = [sys.executable, str(ROOT / "bench" / "kernels.py"), "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        raise NotRun("bench/kernels.py misses a tool; log.txt says which")
    if done.returncode:
        raise RuntimeError(f"bench/kernels.py ended with status {done.returncode}; log.txt has what it printed")
    return json.loads(done.stdout)


STEP = Step("prediction", "the bound of every kernel from its instructions and bytes", ("kernels",), run, 150, 150)
