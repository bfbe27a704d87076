"""Compiles one CUDA file and says what ptxas only remarks, and what the file asks of its own kernels.

Comments of the file, a line each, in place of `…`:
    // expects: UBLKCP …                     each kernel has such instructions; after a kernel's name: that one
    // hot loop: KERNEL WEIGHTS [OPCODE]     a lane's weights in one round of the innermost loop that has most of OPCODE
                                             (without one: HGMMA, else STSM, else STG)
    // budget: KERNEL INSTRUCTIONS           a weight's, at most, in that loop
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import sass
from cuda_toolkit import COMPILE_FLAGS, HOPPER, gencode, ptx_flags

CHECK_FLAGS = ["-cubin", *COMPILE_FLAGS, "-Xptxas", "-v,-warn-spills"]
USUAL_ANCHORS = ("HGMMA", "STSM")
REGISTERS = 65536  # of a multiprocessor
UNDERSTOOD = re.compile(r"// (expects: \S.*|hot loop: \S+ \d+( \S+)?|budget: \S+ \d+(\.\d+)?)$")


def registers_in(ptxas: str) -> dict[str, int]:
    """Of a thread, by kernel, as `ptxas -v` says."""
    found = re.findall(r"Function properties for (\S+)\n.*?\n.*?Used (\d+) registers", ptxas)
    return {name: int(count) for name, count in found}


@dataclass(frozen=True)
class HotLoop:
    """What a file says of a kernel's hot loop, and what ptxas made of it."""

    kernel: str
    weights: int  # a lane's, in one round
    budget: float | None  # instructions per weight
    instructions: int  # in one round
    pipes: Counter[str]

    @property
    def per_weight(self) -> float:
        return self.instructions / self.weights


@dataclass(frozen=True)
class Compiled:
    """A CUDA file as ptxas made it."""

    source: Path
    ptxas: str
    ptx: str
    kernels: dict[str, sass.Kernel]
    architecture: str = HOPPER

    def registers(self) -> dict[str, int]:
        """Of each kernel."""
        return registers_in(self.ptxas)

    def launch_bounds(self) -> dict[str, tuple[int, int]]:
        """Threads of a CTA at most and CTAs of a multiprocessor at least (1 if the kernel doesn't say)."""
        bounds = {}
        for name, between in re.findall(r"\.entry (\w+)\([^)]*\)([^{]*)\{", self.ptx):
            threads, ctas = (re.search(rf"\.{word} (\d+)", between) for word in ("maxntid", "minnctapersm"))
            if threads:
                bounds[name] = int(threads[1]), int(ctas[1]) if ctas else 1
        return bounds

    def hot_loops(self) -> list[HotLoop]:
        """Raises ValueError where a comment names no kernel or no loop of the file."""
        text = self.source.read_text()
        budgets = {name: float(most) for name, most in re.findall(r"^// budget: (\S+) (\S+)$", text, re.MULTILINE)}
        found = []
        for name, weights, anchor in re.findall(r"^// hot loop: (\S+) (\d+)(?: (\S+))?$", text, re.MULTILINE):
            kernel = self._kernel(name)
            opcodes = {instruction.base for instruction in kernel.instructions()}
            anchor = anchor or next((opcode for opcode in USUAL_ANCHORS if opcode in opcodes), "STG")
            path = sass.hot_path(kernel, sass.hot_loop(kernel, anchor), anchor)
            found.append(HotLoop(name, int(weights), budgets.pop(name, None), len(path), sass.count_pipes(path)))
        if budgets:
            raise ValueError(f"{self.source.name}: a budget without a hot loop: {', '.join(budgets)}")
        return found

    def _kernel(self, name: str) -> sass.Kernel:
        if name not in self.kernels:
            raise ValueError(f"{self.source.name}: no kernel {name}, there are {', '.join(self.kernels)}")
        return self.kernels[name]

    def problems(self) -> list[str]:
        """Everything that would make a kernel slower than its source says, which says it of Hopper."""
        found = [*ptxas_problems(self.ptxas), *self._local_memory(), *self._too_many_registers()]
        if self.architecture == HOPPER:
            found += [*self._missing_instructions(), *self._over_budget(), *self._misspelt()]
        return found

    def _misspelt(self) -> list[str]:
        """Comments that would ask for nothing, since nobody understands them."""
        meant = re.findall(
            r"^[ \t]*//+[ \t]*(?:expects?|hot loops?|budgets?)\b.*:.*$", self.source.read_text(), re.MULTILINE
        )
        return [f"{self.source.name}: not understood: {line.strip()}" for line in meant if not UNDERSTOOD.match(line)]

    def _local_memory(self) -> list[str]:
        return [
            f"{name}: {count} accesses to local memory ({opcode})"
            for name, kernel in self.kernels.items()
            for opcode, count in Counter(i.base for i in kernel.instructions()).items()
            if opcode in ("LDL", "STL")
        ]

    def _missing_instructions(self) -> list[str]:
        found = []
        for line in re.findall(r"^// expects: (.+)$", self.source.read_text(), re.MULTILINE):
            first, *rest = line.split()
            names, opcodes = ([first], rest) if first.startswith("unweight_") else (list(self.kernels), [first, *rest])
            for name in names:
                there = {instruction.base for instruction in self._kernel(name).instructions()}
                found += [f"{name}: no {opcode}, which the file expects" for opcode in opcodes if opcode not in there]
        return found

    def _too_many_registers(self) -> list[str]:
        found, bounds, registers = [], self.launch_bounds(), self.registers()
        for name in self.kernels:
            if name not in bounds or name not in registers:
                found.append(f"{name}: no __launch_bounds__")
                continue
            threads, ctas = bounds[name]
            # Handed out to the four parts of a multiprocessor, in steps of 8 a lane.
            warps, each = -(-threads // 128) * 4, -(-registers[name] // 8) * 8
            if ctas * warps * 32 * each > REGISTERS:
                found.append(f"{name}: {registers[name]} registers, too many for {ctas} CTAs of {threads} threads")
        return found

    def _over_budget(self) -> list[str]:
        return [
            f"{loop.kernel}: {loop.per_weight:.2f} instructions per weight in the hot loop, the budget is {loop.budget}"
            for loop in self.hot_loops()
            if loop.budget is not None and loop.per_weight > loop.budget
        ]


def ptxas_problems(ptxas: str) -> list[str]:
    """Spills, local memory and repaired wgmma, from the output of `ptxas -v`."""
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


def compile_file(nvcc: Path | str, source: Path, architecture: str = HOPPER) -> Compiled:
    """Compiles and disassembles. Raises CalledProcessError with the compiler's messages, ToolkitError."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "kernels.cubin", Path(folder) / "kernels.ptx"
        messages = _run([nvcc, *CHECK_FLAGS, gencode(architecture), source, "-o", cubin])
        _run([nvcc, *ptx_flags(architecture), source, "-o", ptx])
        return Compiled(source, messages, ptx.read_text(), sass.disassemble(cubin), architecture)


def _run(command: list[Path | str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("source", type=Path)
    arguments = parser.parse_args()
    try:
        problems = compile_file(arguments.nvcc, arguments.source).problems()
    except subprocess.CalledProcessError as error:
        sys.exit(error.output)
    if problems:
        sys.exit("\n".join([f"{arguments.source}:", *problems]))


if __name__ == "__main__":
    main()
