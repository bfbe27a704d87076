"""Compiles one CUDA file for Hopper and fails on what ptxas only remarks: spills, local memory, repaired wgmma."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from cuda_toolkit import COMPILE_FLAGS, CUBIN_FLAGS

NVCC_FLAGS = ["-cubin", *COMPILE_FLAGS, *CUBIN_FLAGS, "-Xptxas", "-v,-warn-spills"]


def problems(ptxas: str) -> list[str]:
    """What in the output of `ptxas -v` would make a kernel slower than its source says."""
    found = []
    kernel = "?"
    for line in ptxas.splitlines():
        if name := re.search(r"Function properties for (\S+)", line):
            kernel = name[1]
        if sizes := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame, stores, loads = (int(size) for size in sizes.groups())
            if frame or stores or loads:
                found.append(f"{kernel}: {frame} B of local memory, spills {stores} B stored and {loads} B loaded")
        # C7510 and its like: ptxas serialised wgmma, or moved registers around it.
        if re.search(r"\(C75\d\d\)", line):
            found.append(line.strip())
    return found


def compile_checked(nvcc: str, source: str, output: str) -> tuple[str, list[str]]:
    """Returns nvcc's messages and the problems in them. Raises CalledProcessError when the file doesn't compile."""
    command = [nvcc, *NVCC_FLAGS, source, "-o", output]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout, problems(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("source")
    parser.add_argument("output")
    arguments = parser.parse_args()
    try:
        _, found = compile_checked(arguments.nvcc, arguments.source, arguments.output)
    except subprocess.CalledProcessError as error:
        sys.exit(error.output)
    if found:
        sys.exit("\n".join([f"{arguments.source}: ptxas reports", *found]))


if __name__ == "__main__":
    main()
