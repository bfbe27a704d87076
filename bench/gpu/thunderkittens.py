"""The peer for products: ThunderKittens' BF16 GEMM for Hopper, its own benchmark program built from the submodule.

It times itself with rotating buffers and checks itself against a plain product; what is done here is to build and read.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .record import ROOT
from .step import NotRun, Step

FOLDER = ROOT / "third_party" / "ThunderKittens"
GEMM = FOLDER / "kernels" / "gemm" / "bf16_h100"
PROGRAM = ROOT / "build" / "thunderkittens_gemm"
HOW = "git submodule update --init third_party/ThunderKittens"
# The output is of BF16 products of numbers in -1…1 with K = 4096: magnitudes around 20, rounded to 8 bits.
WORST_MEAN_ERROR = 0.1


def require() -> None:
    if not (GEMM / "bf16_h100_gemm.cu").is_file():
        raise NotRun(f"the submodule third_party/ThunderKittens isn't checked out ({HOW})")


def build_command(nvcc: str) -> list[str]:
    """Through its own Makefile, so with the flags that it wants; the program goes outside the submodule."""
    return ["make", "-C", str(GEMM), f"NVCC={nvcc}", f"OUT={PROGRAM}", str(PROGRAM)]


def driver_library() -> Path | None:
    """The driver's library as this machine has it, loaded or not; None without one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    maps = Path("/proc/self/maps").read_text()
    return next((Path(line.split()[-1]) for line in maps.splitlines() if "/libcuda.so" in line), None)


def link_environment(driver: Path, folder: Path) -> dict[str, str]:
    """Lets -lcuda find `driver`: machines that only run CUDA programs have the library, but not under the name that
    linkers look for."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(driver)
    places = filter(None, [str(folder), os.environ.get("LIBRARY_PATH", "")])
    return {**os.environ, "LIBRARY_PATH": os.pathsep.join(places)}


def read(text: str) -> dict:
    """Figures from what the program prints. Raises where its product is wrong."""
    shape = re.search(r"M=(\d+) N=(\d+) K=(\d+)", text)
    spent = re.search(r"Average kernel execution time: ([\d.e+]+) us", text)
    error = re.search(r"err mean:\s*([\d.e+-]+|nan)", text)
    if not (shape and spent and error):
        raise RuntimeError(f"its benchmark prints no shape, time and error, but: {text[-500:]}")
    mean_error = float(error[1])
    if not mean_error <= WORST_MEAN_ERROR:
        raise AssertionError(f"its product has a mean error of {mean_error}, expected at most {WORST_MEAN_ERROR}")
    m, n, k = map(int, shape.groups())
    return {"tokens": m, "out_features": n, "in_features": k, "median": float(spent[1]), "mean_error": mean_error}


def run(unit: str, device: str) -> dict:
    require()
    if device != "cuda":
        raise NotRun("its kernel needs a GPU")
    sys.path.insert(0, str(ROOT / "tools"))
    import native_build

    nvcc = native_build.find_nvcc()
    driver = driver_library()
    for tool, found in {"nvcc": nvcc, "make": shutil.which("make"), "libcuda.so.1": driver}.items():
        if not found:
            raise NotRun(f"no {tool} to build it with")
    PROGRAM.parent.mkdir(exist_ok=True)
    environment = link_environment(driver, PROGRAM.parent / "thunderkittens_link")
    for command in (build_command(str(nvcc.path)), [str(PROGRAM)]):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with status {done.returncode}: {done.stdout[-500:]}")
    return read(done.stdout)


STEP = Step("thunderkittens", "ThunderKittens' GEMM as a peer", ("gemm",), run, 120, 120)
