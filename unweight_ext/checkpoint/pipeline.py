"""Runs jobs on all cores in bounded memory: read, work, write, all overlapping."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from .errors import CheckpointError


class Job(Protocol):
    """Something to do."""

    @property
    def nbytes(self) -> int:
        """How much it is, for sharing out threads."""

    @property
    def cost(self) -> int:
        """Bytes held from the start of the work."""

    @property
    def kept(self) -> int:
        """Bytes still held after it, until the end."""


J = TypeVar("J", bound=Job)

MARGIN = 64 << 20  # what may be held beside three times the largest tensor
_SLACK = 24 << 20  # of it, for stacks, tables, lists of tensors and the allocator's rounding


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int) -> int:
    """A number of threads: `threads`, or all cores for 0."""
    if threads < 0:
        raise CheckpointError(f"threads: {threads}, expected 0 (all cores) or more")
    return threads or usable_cores()


def memory_budget(largest: int) -> int:
    """Bytes that jobs may hold together, for a largest tensor of `largest` bytes."""
    return 3 * largest + MARGIN - _SLACK


@dataclass(frozen=True)
class Stage(Generic[J]):
    """What is done with each job. `work` and `finish` run on any thread; `place` runs in the order of the jobs."""

    work: Callable[[J, int], None]  # gets the number of threads to use
    place: Callable[[J], None]
    finish: Callable[[J], None]


class _Run(Generic[J]):
    def __init__(self, jobs: Sequence[J], stage: Stage[J], threads: int, budget: int) -> None:
        self.jobs, self.stage, self.threads, self.budget = jobs, stage, threads, budget
        self.changed = threading.Condition()
        self.held = 0
        self.started = 0  # jobs taken
        self.placed = 0
        self.done = 0
        self.left = sum(job.nbytes for job in jobs)  # of the jobs not taken
        self.worked: set[int] = set()  # not placed
        self.ready: list[J] = []  # placed, not finished
        self.error: BaseException | None = None

    def _fits(self) -> bool:
        return self.held == 0 or self.held + self.jobs[self.started].cost <= self.budget

    def _threads_for(self, job: J) -> int:
        # One each, as long as enough others run beside it: not when memory holds only a few of this size at a time,
        # nor when little is left to do.
        by_memory = -(-self.threads * job.cost // max(1, self.budget))
        by_rest = self.threads * job.nbytes // max(1, self.left)
        return max(1, min(self.threads, max(by_memory, by_rest)))

    def _next(self) -> Callable[[], None] | None:
        """What this thread does now; None at the end. Called with the lock held."""
        while True:
            if self.error is not None or self.done == len(self.jobs):
                return None
            if self.ready:
                return partial(self._finish, self.ready.pop(0))
            if self.started < len(self.jobs) and self._fits():
                job = self.jobs[self.started]
                task = partial(self._work, self.started, job, self._threads_for(job))
                self.started += 1
                self.held += job.cost
                self.left -= job.nbytes
                return task
            self.changed.wait()

    def _work(self, index: int, job: J, threads: int) -> None:
        self.stage.work(job, threads)
        with self.changed:
            self.held += job.kept - job.cost
            self.worked.add(index)
            while self.placed in self.worked:
                self.worked.remove(self.placed)
                self.stage.place(self.jobs[self.placed])
                self.ready.append(self.jobs[self.placed])
                self.placed += 1
            self.changed.notify_all()

    def _finish(self, job: J) -> None:
        kept = job.kept
        self.stage.finish(job)
        with self.changed:
            self.held -= kept
            self.done += 1
            self.changed.notify_all()

    def _worker(self) -> None:
        while True:
            try:
                with self.changed:
                    task = self._next()
                if task is None:
                    return
                task()
            except BaseException as error:
                self.stop(error)
                return

    def stop(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def run(self) -> None:
        workers = [threading.Thread(target=self._worker, name=f"unweight-{i}") for i in range(self.threads)]
        try:
            for w in workers:
                w.start()
            for w in workers:
                w.join()
        except BaseException as error:  # Ctrl-C reaches the main thread only
            self.stop(error)
            raise
        finally:
            for w in workers:
                if w.ident is not None:
                    w.join()
        if self.error is not None:
            raise self.error


def run_jobs(jobs: Sequence[J], stage: Stage[J], *, threads: int, budget: int) -> None:
    """Runs all jobs. Raises the first error of one, when all threads have stopped."""
    if jobs:
        _Run(jobs, stage, threads, budget).run()
