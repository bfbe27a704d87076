"""How often each SASS instruction of a kernel runs, estimated from what the interpreter counted of its PTX.

ptxas keeps for each instruction the source line that it comes from, and the lines at which that was inlined. All that
comes from one place runs about as often: what the PTX instructions of the place ran on average, the SASS instructions
of the same place are taken to run. So this counts whole kernels; bench/sass.py counts hot loops, exactly.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import check_cubin
import cuda_toolkit
import sass

Place = tuple[tuple[str, int], ...]  # (file name, line), innermost first


@dataclass(frozen=True)
class Compiled:
    """A .cu file."""

    text: str  # of `nvdisasm -c -gi`
    registers: dict[str, int]  # of a thread, by kernel


@dataclass(frozen=True)
class Estimate:
    operations: dict[str, float]  # instructions by pipe, as often as the places ran
    unmatched: float  # the share of the kernel's instructions whose place no PTX instruction has


def place_of(frames: object) -> Place:
    return tuple((Path(file).name, line) for file, line in frames)


def places_in(text: str) -> dict[str, list[Place]]:
    """Kernel -> the place of each of its instructions, in the output of `nvdisasm -c -gi`."""
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.MULTILINE)
    found = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        places: list[Place] = []
        place: Place = ()
        frames: list[tuple[str, int]] = []
        for line in body.split("\n\t.section")[0].splitlines():
            if frame := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
                frames.append((frame[1], int(frame[2])))
            elif re.match(r"\s*/\*[0-9a-f]{4,}\*/.*;", line):
                if frames:
                    place, frames = place_of(frames), []
                places.append(place)
        found[name] = places
    return found


def compile_file(source: Path) -> Compiled:
    """For Hopper. Raises ToolkitError without nvcc or nvdisasm."""
    nvcc, nvdisasm = cuda_toolkit.find_nvcc(), cuda_toolkit.find_program("nvdisasm")
    if nvcc is None:
        raise cuda_toolkit.ToolkitError(f"{cuda_toolkit.NVCC_NOT_FOUND}: {cuda_toolkit.INSTALL_HINT}")
    if nvdisasm is None:
        raise cuda_toolkit.ToolkitError("nvdisasm is neither in site-packages nor on the path")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        flags = ["-cubin", "-Xptxas", "-v", *cuda_toolkit.COMPILE_FLAGS, cuda_toolkit.gencode(cuda_toolkit.HOPPER)]
        messages = _output_of(nvcc.path, *flags, source, "-o", cubin)
        return Compiled(_output_of(nvdisasm, "-c", "-gi", cubin), check_cubin.registers_in(messages))


def _output_of(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise cuda_toolkit.ToolkitError(f"{command[0]} ended with status {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout + done.stderr


def located(text: str) -> dict[str, list[tuple[Place, str]]]:
    """Kernel -> (place, pipe) of each instruction in the output of `nvdisasm -c -gi`.

    Without those that only lanes reach which part before a warp-wide instruction: ours never do.
    """
    places = places_in(text)
    found = {}
    for name, kernel in sass.parse(text).items():
        reached, todo = set(), [0]
        while todo:
            index = todo.pop()
            if index not in reached:
                reached.add(index)
                todo += kernel.blocks[index].successors
        order = ((index, one) for index, block in enumerate(kernel.blocks) for one in block.instructions)
        found[name] = [
            (place, sass.pipe_of(one))
            for place, (index, one) in zip(places[name], order, strict=True)
            if index in reached
        ]
    return found


def most_of(
    instructions: list[tuple[Place, str]], runs: Mapping[Place, float], most: int = 20
) -> list[tuple[Place, float]]:
    """The places with the most instructions run, in falling order."""
    counts: Counter[Place] = Counter()
    for place, _ in instructions:
        counts[place] += runs.get(place, 0.0)
    return counts.most_common(most)


def estimate(instructions: list[tuple[Place, str]], runs: Mapping[Place, float]) -> Estimate:
    """`runs`: how often each PTX instruction of a place ran on average. What has no place there counts as not run."""
    operations: Counter[str] = Counter()
    unmatched = 0
    for place, pipe in instructions:
        operations[pipe] += runs.get(place, 0.0)
        unmatched += place not in runs
    return Estimate(dict(operations), unmatched / len(instructions))
