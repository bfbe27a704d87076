"""What the figures were measured on."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

from .record import ROOT
from .step import Step

SMI_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)


def output_of(*command: str) -> str | None:
    """What a program prints, or None where it isn't there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


def smi() -> dict[str, str] | None:
    """What nvidia-smi says of the first GPU."""
    text = output_of("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader")
    return dict(zip(SMI_FIELDS, (x.strip() for x in text.splitlines()[0].split(",")), strict=False)) if text else None


def compiler() -> str | None:
    """The release that the build's nvcc names."""
    sys.path.insert(0, str(ROOT / "tools"))
    import native_build

    nvcc = native_build.find_nvcc()
    return f"nvcc {nvcc.version[0]}.{nvcc.version[1]}" if nvcc else None


def run(unit: str, device: str) -> dict:
    import torch

    figures: dict = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "compiler": compiler(),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "changed_files": len((output_of("git", "status", "--porcelain") or "").splitlines()),
        "cpu": platform.processor() or platform.machine(),
        "smi": smi(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        figures["gpu"] = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return figures


STEP = Step("environment", "machine, driver, versions", ("machine",), run, seconds=60, unit_seconds=60)
