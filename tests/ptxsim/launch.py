"""The machine: memory, and launches of kernels on it under a seeded scheduler."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checks import KernelReport, Kind, Report, Reports
from .counters import Counters
from .dependent import EarlierLaunch
from .execute import Code, Entry, compile_kernel
from .handlers import LANES
from .handlers_barrier import BARRIERS, Abort, NamedBarrier
from .memory import GlobalMemory, Region, SharedLayout, SharedMemory
from .ordering import Ordering
from .program import Instruction, Kernel, Module
from .races import Clocks
from .warps import Warp

# They register their opcodes.
for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if _module.name.startswith("handlers_"):
        importlib.import_module(f".{_module.name}", __package__)

SHARED_PER_MULTIPROCESSOR = 228 * 1024
SHARED_PER_CTA = 227 * 1024
THREADS_PER_MULTIPROCESSOR = 2048
_MAX_RESIDENT_THREADS = 2048  # of the machine: a vector clock has an entry for each
_MAX_BURST = 7  # a warp runs up to 2^7 instructions before another is chosen
DEFAULT_STEP_BUDGET = 4_000_000  # warp instructions of one launch


@dataclass(eq=False)
class Pending:
    """An asynchronous operation that isn't complete. `complete` does it; the scheduler decides when."""

    warp: Warp
    instruction: Instruction
    complete: Callable[[], None]
    text: str


class Cta:
    def __init__(self, machine: Machine, index: int, slot: int, launch: _Launch):
        self.machine = machine
        self.index = index
        self.slot = slot
        self.grid = launch.grid
        self.threads = launch.block
        self.dynamic_bytes = launch.shared_bytes
        self.layout = launch.layout
        self.shared = SharedMemory(launch.layout, machine.clocks)
        self.barriers = [NamedBarrier(number) for number in range(BARRIERS)]
        self.mbarriers: dict[int, object] = {}  # by address in shared memory
        self.pending: list[Pending] = []
        self.at_exit: list[Callable[[], None]] = []  # checks
        self.warpgroups: dict[int, object] = {}  # by first warp
        self.register_pool: object | None = None  # of setmaxnreg
        self.warps: list[Warp] = []
        count = -(-launch.block // LANES)
        first_agent = machine.clocks.add(count * LANES)
        for i in range(count):
            threads = min(LANES, launch.block - LANES * i)
            self.warps.append(Warp(self, i, threads, first_agent + LANES * i, launch.code))

    @property
    def done(self) -> bool:
        return all(warp.done for warp in self.warps)

    def release(self) -> None:
        """Lets go of what refers to itself, and so to all of memory: Python's collector would let it pile up."""
        for warp in self.warps:
            vars(warp).clear()
        vars(self).clear()

    def post(self, warp: Warp, complete: Callable[[], None], text: str) -> None:
        """Starts an asynchronous operation that the current instruction of `warp` asks for."""
        self.pending.append(Pending(warp, warp.current, complete, text))


@dataclass
class _Launch:
    kernel: Kernel
    code: Code
    layout: SharedLayout
    grid: int
    block: int
    shared_bytes: int
    ctas: Sequence[int]  # those that run


class Machine:
    """A GPU of a few multiprocessors. The seed decides the order of warps and of asynchronous operations."""

    def __init__(
        self,
        multiprocessors: int = 2,
        seed: int = 0,
        step_budget: int = DEFAULT_STEP_BUDGET,
        shared_per_cta: int = SHARED_PER_CTA,
    ):
        self.multiprocessors = multiprocessors
        self.shared_per_cta = shared_per_cta
        self.step_budget = step_budget
        self.random = random.Random(seed)
        self.memory = GlobalMemory()
        self.counters = Counters()
        self.clocks = Clocks()
        self.ordering = Ordering()
        self.earlier: EarlierLaunch | None = None  # the one before, where it may still run
        self.parameters = np.zeros(0, np.uint8)
        self.reports = Reports("")
        self.epoch = 0  # goes up with everything that could let a blocked warp go on
        self.steps = 0
        self._symbols: dict[Module, dict[str, int]] = {}  # addresses of a module's variables

    def allocate(self, content: np.ndarray | int, name: str, readonly: bool = False) -> Region:
        """Global memory: an array's bytes, or so many bytes of unknown content. `.base` is its address."""
        return self.memory.allocate(content, name, readonly)

    def wake(self) -> None:
        """Something happened that blocked instructions may have waited for."""
        self.epoch += 1

    def launch(
        self,
        kernel: Kernel,
        grid: int,
        block: int,
        shared_bytes: int = 0,
        arguments: bytes = b"",
        check: bool = True,
        programmatic: bool = False,
        ctas: Sequence[int] | None = None,
    ) -> list[Report]:
        """Runs a kernel on `grid` CTAs of `block` threads. `arguments`: the bytes of all parameters. `programmatic`: it
        may start before the launch before it is complete (dependent.py); what that wrote is there all the same.
        `ctas`: only these of the grid, where all would take too long.

        Raises KernelReport if there is anything to report; with check=False returns the reports instead. Raises
        UnsupportedInstruction for an instruction that the interpreter doesn't know.
        """
        self.reports = Reports(kernel.name)
        self.clocks = Clocks()
        self.ordering = Ordering()
        addresses = self._addresses(kernel)
        self.earlier = EarlierLaunch(self.clocks) if programmatic else None
        self.memory.start(self.clocks, self.earlier)
        layout = SharedLayout(kernel, shared_bytes)
        if self._fits(kernel, grid, block, layout, arguments):
            self.parameters = np.frombuffer(arguments.ljust(kernel.parameter_bytes, b"\0"), np.uint8)
            entries = _compiled(kernel)
            code = Code(kernel, entries, layout, addresses)
            with np.errstate(all="ignore"):
                self._run(
                    _Launch(kernel, code, layout, grid, block, shared_bytes, range(grid) if ctas is None else ctas)
                )
            if self.earlier and not self.earlier.awaited:
                detail = (
                    "no thread executes griddepcontrol.wait: who waits for this launch doesn't wait for the one before"
                )
                self.reports.add(Kind.DEPENDENT, None, "", detail)
            self.counters.add_instructions(kernel.name, kernel.instructions, code.warp_counts, code.thread_counts)
        reports = self.reports.all()
        if reports and check:
            raise KernelReport(reports)
        return reports

    def _fits(self, kernel: Kernel, grid: int, block: int, layout: SharedLayout, arguments: bytes) -> bool:
        limit = min(kernel.max_threads or 1024, 1024)
        problems = []
        if grid < 1:
            problems.append(f"grid of {grid}: at least 1")
        if not 1 <= block <= limit:
            problems.append(f"block of {block}: 1 to {limit} threads")
        if layout.used_bytes > self.shared_per_cta:
            problems.append(f"{layout.used_bytes} bytes of shared memory: at most {self.shared_per_cta}")
        if len(arguments) != kernel.parameter_bytes:
            problems.append(f"{len(arguments)} bytes of arguments: the kernel has {kernel.parameter_bytes}")
        for problem in problems:
            self.reports.add(Kind.LAUNCH, None, "", problem)
        return not problems

    def _addresses(self, kernel: Kernel) -> dict[str, int]:
        """Of the module's global and const variables, which live as long as the machine."""
        module = kernel.module
        if module not in self._symbols:
            addresses = self._symbols[module] = {}
            for name, variable in module.variables.items():
                constant = variable.space == "const"
                region = self.allocate(np.frombuffer(variable.initial, np.uint8), name, readonly=constant)
                region.constant = constant
                addresses[name] = region.base
        return self._symbols[module]

    def _resident(self, launch: _Launch) -> int:
        per_multiprocessor = min(
            SHARED_PER_MULTIPROCESSOR // (launch.layout.used_bytes + 1024),
            THREADS_PER_MULTIPROCESSOR // launch.block,
            32,
        )
        most = max(_MAX_RESIDENT_THREADS // launch.block, 1)
        return max(min(per_multiprocessor * self.multiprocessors, len(launch.ctas), most), 1)

    def _run(self, launch: _Launch) -> None:
        waiting = iter(launch.ctas)
        ctas = [Cta(self, next(waiting), slot, launch) for slot in range(self._resident(launch))]
        self.steps = 0
        idle = 0
        try:
            while ctas:
                progress = self._round(ctas)
                for cta in [cta for cta in ctas if cta.done]:
                    self._retire(cta)
                    ctas.remove(cta)
                    progress = True
                    index = next(waiting, None)
                    if index is not None:
                        ctas.append(Cta(self, index, cta.slot, launch))
                    cta.release()
                if progress or self._complete_one(ctas):
                    idle = 0
                elif idle:
                    self._report_deadlock(ctas)
                    return
                else:  # let every blocked instruction look once more
                    idle = 1
                    self.wake()
                if self.steps > self.step_budget:
                    self._report_budget(ctas)
                    return
        except Abort:
            return
        finally:
            for cta in ctas:
                cta.release()

    def _round(self, ctas: list[Cta]) -> bool:
        """Lets each warp run a while, in some order, and some asynchronous operations complete."""
        warps = [warp for cta in ctas for warp in cta.warps if warp.groups]
        self.random.shuffle(warps)
        progress = 0
        for warp in warps:
            if warp.runnable():
                executed = warp.run(1 << self.random.randint(0, _MAX_BURST))
                progress += executed
                self.steps += executed
                if warp.done:
                    self._warp_exited(warp)
        for cta in ctas:
            for operation in list(cta.pending):
                if self.random.random() < 0.25:
                    self._complete(cta, operation)
                    progress += 1
        return progress > 0

    def _complete_one(self, ctas: list[Cta]) -> bool:
        choices = [(cta, operation) for cta in ctas for operation in cta.pending]
        if not choices:
            return False
        self._complete(*self.random.choice(choices))
        return True

    def _complete(self, cta: Cta, operation: Pending) -> None:
        cta.pending.remove(operation)
        operation.complete()
        self.wake()

    def _warp_exited(self, warp: Warp) -> None:
        for barrier in warp.cta.barriers:
            barrier.try_complete(warp.cta)
        self.wake()

    def _retire(self, cta: Cta) -> None:
        # What nobody waited for is reported however fast it was; what may go on after the end does.
        for check in cta.at_exit:
            check()
        for operation in cta.pending:
            operation.complete()
        cta.pending.clear()
        for barrier in cta.barriers:
            if barrier.arrived:
                detail = f"the CTA exits while {barrier}"
                cta.warps[0].report(Kind.BARRIER, detail, instruction=barrier.instruction)

    def _report_budget(self, ctas: list[Cta]) -> None:
        warp = max((warp for cta in ctas for warp in cta.warps), key=lambda warp: warp.steps)
        detail = f"more than {self.step_budget} warp instructions; {warp.steps} by this warp"
        warp.report(Kind.STEP_BUDGET, detail)

    def _report_deadlock(self, ctas: list[Cta]) -> None:
        lines = ["nothing can go on:"]
        first = None
        for cta in ctas:
            for warp in cta.warps:
                for group in warp.groups:
                    instruction = warp.code.entries[group.pc].instruction
                    first = first or (warp, instruction)
                    why = "waits for lanes of its warp" if group.waiting else "blocked"
                    lines.append(
                        f"  {warp.name}, {group.count} lanes: {why} at {instruction.location}: {instruction.text}"
                    )
            lines += [f"  CTA {cta.index}, {barrier}" for barrier in cta.barriers if barrier.arrived]
            lines += [
                f"  CTA {cta.index}, mbarrier at {cta.shared.describe(address)}: {state}"
                for address, state in sorted(cta.mbarriers.items())
            ]
            if cta.register_pool:
                lines.append(f"  CTA {cta.index}, {cta.register_pool}")
        warp, instruction = first
        warp.report(Kind.DEADLOCK, "\n".join(lines), instruction=instruction)


def _compiled(kernel: Kernel) -> list[Entry]:
    """Compiled once: a parsed module is run many times."""
    if kernel.compiled is None:
        kernel.compiled = compile_kernel(kernel)
    return kernel.compiled
