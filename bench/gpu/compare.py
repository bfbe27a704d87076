"""Predicted against measured, by kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.model import Bound, Demand, Gpu, bound

ANY_TILES = "unweight_unpack_tiles"


@dataclass(frozen=True)
class Comparison:
    unit: str  # of the timing step
    kernel: str
    predicted: float  # microseconds
    measured: float  # microseconds
    limiter: str

    @property
    def ratio(self) -> float:
        """Measured over predicted: 1 is the bound, and less can't be."""
        return self.measured / self.predicted


def case_of(unit: str) -> str:
    """What bench/kernels.py calls a unit of the timing step: verb and layout."""
    return " ".join(unit.split(" ")[:2])


def twin_of(unit: str, kernel: str) -> str:
    """Operators don't know the layout and launch a kernel for all tiled ones; what is predicted is the layout's own."""
    return f"unweight_unpack_{unit.split(' ')[1]}" if kernel == ANY_TILES else kernel


def weights_of(figures: Mapping) -> int:
    """The weights that a call of this unit handles: the whole matrix, or the rows that an embedding looks up."""
    if "rows" not in figures:
        return figures["weights"]
    return figures["rows"] * figures["in_features"]


def bounds_of(rows: list[dict], gpu: Gpu) -> dict[tuple[str, str], Bound]:
    """(case, kernel) -> bound, from the rows of bench/kernels.py --json."""
    return {(row["case"], row["kernel"]): bound(Demand(**row["demand"]), gpu) for row in rows}


def compare(timings: Mapping[str, Mapping], rows: list[dict], gpu: Gpu) -> list[Comparison]:
    """Every kernel that was both predicted and measured. `timings`: unit -> figures of the timing step."""
    bounds = bounds_of(rows, gpu)
    found = []
    for unit, figures in timings.items():
        for kernel, spent in figures["kernels"].items():
            predicted = bounds.get((case_of(unit), kernel)) or bounds.get((case_of(unit), twin_of(unit, kernel)))
            if predicted:
                least = predicted.microseconds(weights_of(figures))
                found.append(Comparison(unit, kernel, least, spent, predicted.limiter))
    return found
