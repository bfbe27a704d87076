"""Runs the PTX that nvcc emits (sm_90a, sm_80) on a CPU, and checks what a GPU can't show. docs/KERNELS.md explains it.

module = parse_ptx(text)
machine = Machine(multiprocessors=2, seed=0)
x = machine.allocate(array, "x", readonly=True)
machine.launch(module.kernels["name"], grid, block, shared_bytes, argument_bytes)
"""

from .alu_types import UnsupportedInstruction
from .checks import KernelReport, Kind, Report
from .launch import Machine
from .parse import parse_ptx

__all__ = ["KernelReport", "Kind", "Machine", "Report", "UnsupportedInstruction", "parse_ptx"]
