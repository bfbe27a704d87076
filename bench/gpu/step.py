"""What a step of the run is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class NotRun(Exception):
    """Raised by a unit that can't run here; the text says why. That is no failure."""


@dataclass(frozen=True)
class Step:
    """Units that run one after the other in a process of their own (worker.py).

    `run(unit, device)` returns figures for JSON, raises NotRun where it can't run, and anything else when it failed.
    """

    name: str
    about: str
    units: tuple[str, ...]
    run: Callable[[str, str], dict]
    seconds: float  # for the step's units together in one call
    unit_seconds: float  # for one unit and the start of its process; one that takes longer has failed
    needs: tuple[str, ...] = ()  # steps that must have run without failure before
