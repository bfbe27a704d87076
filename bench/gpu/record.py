"""results.json: what every unit gave, written again after each, so that a run that is stopped loses one unit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = "results.json"

OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(frozen=True)
class Outcome:
    """Of one unit."""

    status: str
    reason: str = ""  # why it failed or was not run
    figures: dict = field(default_factory=dict)
    seconds: float = 0.0


def hash_sources(folders: Iterable[str] = ("csrc", "tools", "unweight_ext", "bench", "tests")) -> str:
    """Of all that decides what a run gives; two runs with different hashes can't be joined."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class Record:
    """The outcomes of a folder. What is there already counts if it is of the same sources and device."""

    def __init__(self, folder: Path, device: str, sources: str) -> None:
        self.file = folder / FILE
        self.about = {"device": device, "sources": sources}
        self.steps: dict[str, dict[str, Outcome]] = {}
        self.dropped = ""  # why earlier results don't count, when they don't
        folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self._load()

    def _load(self) -> None:
        try:
            stored = json.loads(self.file.read_text())
            steps = {
                step: {unit: Outcome(**outcome) for unit, outcome in units.items()}
                for step, units in stored["steps"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.dropped = f"{self.file.name} isn't what this program wrote ({type(error).__name__}: {error})"
            return
        changed = [name for name, value in self.about.items() if stored.get(name) != value]
        if changed:
            was = ", ".join(f"{name} {stored.get(name)!r}, now {self.about[name]!r}" for name in changed)
            self.dropped = f"the results in {self.file.name} are of another state ({was})"
        else:
            self.steps = steps

    def get(self, step: str, unit: str) -> Outcome | None:
        return self.steps.get(step, {}).get(unit)

    def put(self, step: str, unit: str, outcome: Outcome) -> None:
        self.steps.setdefault(step, {})[unit] = outcome
        self.save()

    def save(self) -> None:
        steps = {step: {unit: asdict(outcome) for unit, outcome in units.items()} for step, units in self.steps.items()}
        scratch = self.file.with_suffix(".json.partial")
        scratch.write_text(json.dumps({**self.about, "steps": steps}, indent=1) + "\n")
        os.replace(scratch, self.file)

    def with_status(self, *statuses: str) -> list[tuple[str, str, Outcome]]:
        """(step, unit, outcome), in the order in which they were run."""
        return [
            (step, unit, outcome)
            for step, units in self.steps.items()
            for unit, outcome in units.items()
            if outcome.status in statuses
        ]
