"""One line that says what a figure was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Date, processor, cores in use, memory, torch and how many threads it has."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = lines[0] if lines else name
    flags = "AVX-512 BF16" if "avx512_bf16" in (info.read_text() if info.exists() else "") else "no AVX-512 BF16"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{datetime.date.today()}, {name} ({flags}), {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
