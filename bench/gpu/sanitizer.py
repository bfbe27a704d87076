"""compute-sanitizer over a small run of every kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from .record import ROOT
from .step import NotRun, Step

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 99  # the exit status for findings
# torch asks the driver for more than it has, and copes; errors of our own launches are raised by the operators.
OPTIONS = {"memcheck": ("--report-api-errors", "no")}
_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def find() -> str | None:
    """compute-sanitizer of the path, or of a CUDA toolkit beside it."""
    homes = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join([*homes, *_PLACES])
    )


def findings(text: str) -> list[str]:
    """The lines that say what was found, without addresses of threads and host frames."""
    return [
        line.removeprefix("=========").strip()
        for line in text.splitlines()
        if re.match(
            r"=========\s+(Invalid|Error|Warning|Uninitialized|Barrier|Program hit|Race|Potential|Misaligned)", line
        )
    ]


def run(unit: str, device: str) -> dict:
    """Runs sanitized.py under one tool. Without the caching allocator, so each tensor has bounds of its own."""
    if device != "cuda":
        raise NotRun("compute-sanitizer looks at GPUs")
    program = find()
    if program is None:
        raise NotRun("no compute-sanitizer on the path, in CUDA_HOME or /usr/local/cuda")
    command = [program, "--tool", unit, "--error-exitcode", str(FOUND), *OPTIONS.get(unit, ())]
    command += [sys.executable, "-m", "bench.gpu.sanitized"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    return read(done.returncode, done.stdout)


def read(status: int, text: str) -> dict:
    """The figures of a run that found nothing. Raises where it found something, or never looked."""
    if "Device not supported" in text:
        raise NotRun("compute-sanitizer says: Device not supported")
    found = findings(text)
    if status == FOUND or found:
        raise AssertionError(f"{len(found)} findings, first: {found[0] if found else 'see log.txt'}")
    if status != 0:
        lines = text.strip().splitlines() or ["nothing printed"]
        raise RuntimeError(f"the program under compute-sanitizer ended with status {status}: {lines[-1]}")
    ran = re.search(r"(\d+) operators ran", text)
    if ran is None or not re.search("(ERROR|RACECHECK) SUMMARY", text):
        raise RuntimeError("compute-sanitizer printed no summary: nothing was checked")
    return {"operators": int(ran[1])}


STEP = Step("sanitizer", "compute-sanitizer over a small run of every kernel", TOOLS, run, 180, 90, needs=("build",))
