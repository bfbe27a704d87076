"""Runs jobs on all cores in bounded memory: read, work, write, all overlapping."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from .errors import CheckpointError
from .memory import JOB_SCRATCH, THREAD_SCRATCH, Resident


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

# Eight pack as fast as one file can be written: the system lets one thread write to it at a time.
_MOST_THREADS = 16
_LOOK_UP = 0.1  # seconds after which a waiting worker sees an error
_LARGE = 8 << 20  # from here on, the last tensors of a file are worth all threads


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LIMIT = 1024  # more can't be started on many systems


def check_threads(threads: int) -> int:
    """A number of threads: `threads`, or all cores for 0, at most 16."""
    if not 0 <= threads <= _LIMIT:
        raise CheckpointError(f"threads: {threads}, expected 0 (all cores, at most {_MOST_THREADS}) to {_LIMIT}")
    return threads or min(usable_cores(), _MOST_THREADS)


@dataclass(frozen=True)
class Stage(Generic[J]):
    """What is done with each job. `work` and `finish` run on any thread; `place` runs in the order of the jobs."""

    work: Callable[[J, int], None]  # gets the number of threads to use
    place: Callable[[J], None]
    finish: Callable[[J], None]


class _Run(Generic[J]):
    def __init__(self, jobs: Sequence[J], stage: Stage[J], threads: int, budget: int) -> None:
        self.jobs, self.stage, self.threads, self.budget = jobs, stage, threads, budget
        # No more workers than can hold a job at once: each that ever worked keeps its scratch.
        smallest = min(job.cost for job in jobs) + JOB_SCRATCH
        self.workers = max(1, min(threads, len(jobs), budget // smallest))
        if any(self._wants_all(job) for job in jobs):
            idle = self.workers + threads - 4  # two of both are in JOB_SCRATCH
            self.budget -= max(0, idle) * THREAD_SCRATCH
        self.resident = Resident(budget)
        self.changed = threading.Condition()
        self.held = 0  # bytes
        self.working = 0  # of them, by jobs that may not have used them yet
        self.started = 0  # jobs taken
        self.placed = 0
        self.done = 0
        self.left = sum(job.nbytes for job in jobs)  # of the jobs not taken
        self.worked: set[int] = set()  # not placed
        self.ready: list[J] = []  # placed, not finished
        self.error: BaseException | None = None
        self.ended: set[int] = set()  # workers
        self.wake: SimpleQueue[None] = SimpleQueue()

    def _wants_all(self, job: J) -> bool:
        """Whether memory holds so few tensors of this size at once that one thread each would leave cores idle."""
        return self.threads > 1 and self.budget // (job.cost + JOB_SCRATCH) <= self.threads // 2

    def _fits(self) -> bool:
        return self.held == 0 or self.held + self.jobs[self.started].cost + JOB_SCRATCH <= self.budget

    def _threads_for(self, job: J) -> int:
        last = job.nbytes >= _LARGE and job.nbytes * self.threads > self.left
        return self.threads if last or self._wants_all(job) else 1

    def _next(self, first: bool) -> Callable[[], None] | None:
        """What a worker does now; None at the end. Called with the lock held.

        Only the first worker takes tensors that want more threads: each of them would get threads of its own.
        """
        while True:
            if self.error is not None or self.done == len(self.jobs):
                return None
            if self.ready:
                return partial(self._finish, self.ready.pop(0))
            if self.started < len(self.jobs) and self._fits():
                job = self.jobs[self.started]
                threads = self._threads_for(job)
                if threads == 1 or first:
                    self.working += job.cost + JOB_SCRATCH
                    task = partial(self._work, self.started, job, threads, self.working)
                    self.started += 1
                    self.held += job.cost + JOB_SCRATCH
                    self.left -= job.nbytes
                    return task
            self.changed.wait(_LOOK_UP)

    def _work(self, index: int, job: J, threads: int, room: int) -> None:
        self.resident.make_room(room)
        self.stage.work(job, threads)
        with self.changed:
            self.working -= job.cost + JOB_SCRATCH
            self.held += job.kept - job.cost - JOB_SCRATCH
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

    def _worker(self, number: int) -> None:
        try:
            while True:
                with self.changed:
                    task = self._next(number == 0)
                if task is None:
                    break
                task()
                del task
        except BaseException as error:
            self.error = self.error or error
            with self.changed:
                self.changed.notify_all()
        finally:
            self.ended.add(number)
            self.wake.put(None)

    def run(self) -> None:
        # Ctrl-C reaches this thread, and may strike between any two steps of it. So it takes no lock that it could
        # leave locked, and doesn't use Thread.join, which before Python 3.13 takes an interrupted thread for ended.
        threads = [threading.Thread(target=self._worker, args=(i,)) for i in range(self.workers)]
        try:
            with _uninterrupted():
                for t in threads:
                    t.start()
            self._wait(threads)
        except BaseException as error:
            self.error = error
            with _uninterrupted():  # for as long as one tensor takes
                self._wait(threads)
            raise
        finally:
            self.resident.close()
        if self.error is not None:
            raise self.error

    def _wait(self, threads: list[threading.Thread]) -> None:
        # A signal may come after a wake-up is taken and before it counts, so the set counts and the queue only hurries.
        while len(self.ended) < sum(t.ident is not None for t in threads):
            with suppress(Empty):
                self.wake.get(timeout=_LOOK_UP)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait until the end, for this thread and those that it starts."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def run_jobs(jobs: Sequence[J], stage: Stage[J], *, threads: int, budget: int) -> None:
    """Runs all jobs. Raises the first error of one, when all threads have stopped."""
    if jobs:
        _Run(jobs, stage, threads, budget).run()
