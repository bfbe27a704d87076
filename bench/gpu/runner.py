"""Runs steps within a time budget: what is done already is left out, what hangs is killed, the rest has its reason."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from .record import FAILED, NOT_RUN, OK, ROOT, Outcome, Record
from .step import Step

OUT_OF_TIME = "the time of this call was up; call again to run it"
STEP_OUT_OF_TIME = "the step's time in one call was up; call again to run it"


class Worker:
    """A process of worker.py, and all that it starts."""

    def __init__(self, module: str, step: str, device: str, log: Path) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.worker", module, step, device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def ask(self, unit: str, seconds: float) -> Outcome | None:
        """The unit's outcome, or None when it took longer than that; then the process is gone."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(unit.encode() + b"\n")
            self.process.stdin.flush()
        reply = b""
        while not reply.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                return None
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                status = self.process.wait()
                ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
                return Outcome(FAILED, f"its process ended with {ended}; log.txt has what it printed")
            reply += piece
        return Outcome(**json.loads(reply))

    @property
    def closed(self) -> bool:
        return self.process.stdout.closed

    def close(self) -> None:
        """Ends the process and all that it started; once more does nothing."""
        if self.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Runner:
    """`module` names the module whose STEPS are run on `device`; `seconds` are for all of them in this call."""

    def __init__(
        self,
        module: str,
        device: str,
        record: Record,
        log: Path,
        seconds: float,
        say: Callable[[str], object] = print,
    ) -> None:
        self.module, self.device, self.record, self.log, self.say = module, device, record, log, say
        self.steps: Sequence[Step] = import_module(module).STEPS
        self.deadline = time.monotonic() + seconds

    def run(self) -> None:
        for step in self.steps:
            todo = [unit for unit in step.units if not self._done(step.name, unit)]
            kept = len(step.units) - len(todo)
            self.say(f"{step.name}: {step.about}" + (f" ({kept} of {len(step.units)} done before)" if kept else ""))
            if missing := self._missing(step):
                self._not_run(step, todo, f"needs {missing}")
            else:
                self._run_units(step, todo)

    def _done(self, step: str, unit: str) -> bool:
        outcome = self.record.get(step, unit)
        return outcome is not None and outcome.status == OK

    def _missing(self, step: Step) -> str:
        """The first step that this one needs and that wasn't run without failure."""
        for name in step.needs:
            needed = next(other for other in self.steps if other.name == name)
            for unit in needed.units:
                outcome = self.record.get(name, unit)
                if outcome is None or outcome.status != OK:
                    return f"{name}, which {'was not run' if outcome is None else f'is: {outcome.status}'}"
        return ""

    def _run_units(self, step: Step, todo: list[str]) -> None:
        step_end = min(self.deadline, time.monotonic() + step.seconds)
        with contextlib.ExitStack() as workers:
            worker = None
            for position, unit in enumerate(todo):
                left = step_end - time.monotonic()
                if left <= 0:
                    return self._not_run(step, todo[position:], self._why_over(step_end))
                if worker is None:
                    worker = Worker(self.module, step.name, self.device, self.log)
                    workers.callback(worker.close)
                outcome = worker.ask(unit, min(left, step.unit_seconds))
                if outcome is None and left < step.unit_seconds:
                    outcome = Outcome(NOT_RUN, self._why_over(step_end), seconds=left)
                elif outcome is None:
                    outcome = Outcome(
                        FAILED, f"took longer than {step.unit_seconds:g} s and was stopped", seconds=step.unit_seconds
                    )
                if worker.closed or outcome.status == FAILED:
                    worker.close()
                    worker = None
                self._put(step, unit, outcome)

    def _why_over(self, step_end: float) -> str:
        return STEP_OUT_OF_TIME if step_end < self.deadline else OUT_OF_TIME

    def _not_run(self, step: Step, units: list[str], reason: str) -> None:
        for unit in units:
            self._keep(step, unit, Outcome(NOT_RUN, reason))
        if units:
            self.say(f"  not run: {units[0] if len(units) == 1 else f'{len(units)} units'} ({reason})")

    def _put(self, step: Step, unit: str, outcome: Outcome) -> None:
        self._keep(step, unit, outcome)
        reason = outcome.reason.partition("\n")[0]
        self.say(f"  {unit}: {outcome.status}, {outcome.seconds:.1f} s" + (f" ({reason})" if reason else ""))

    def _keep(self, step: Step, unit: str, outcome: Outcome) -> None:
        before = self.record.get(step.name, unit)
        if outcome.status == NOT_RUN and before is not None and before.status == FAILED:
            outcome = before  # what has failed has failed until it is run again
        self.record.put(step.name, unit, outcome)
