"""report.md: what was run, what failed, what was not run and why, and the figures."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from bench.model import GPUS, gpu_of

from . import bars
from .compare import compare, weights_of
from .record import FAILED, NOT_RUN, OK, Outcome, Record
from .step import Step


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; bars in cells are escaped."""
    lines = [list(head), ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def one_line(text: str, length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


class Report:
    """Of a record of `steps`."""

    def __init__(self, record: Record, steps: Sequence[Step]) -> None:
        self.record, self.steps = record, steps

    def figures(self, step: str) -> dict[str, dict]:
        """unit -> figures, of those that ran."""
        units = self.record.steps.get(step, {})
        return {unit: outcome.figures for unit, outcome in units.items() if outcome.status == OK}

    def outcome(self, step: Step, unit: str) -> Outcome:
        return self.record.get(step.name, unit) or Outcome(NOT_RUN, "not reached")

    def counts(self) -> str:
        """One line."""
        outcomes = [self.outcome(step, unit).status for step in self.steps for unit in step.units]
        return ", ".join(f"{outcomes.count(status)} {status}" for status in (OK, FAILED, NOT_RUN))

    def not_run(self) -> list[str]:
        """One line a step and reason."""
        lines = []
        for step in self.steps:
            reasons: dict[str, list[str]] = {}
            for unit in step.units:
                outcome = self.outcome(step, unit)
                if outcome.status == NOT_RUN:
                    reasons.setdefault(one_line(outcome.reason), []).append(unit)
            for reason, units in reasons.items():
                which = "all of it" if len(units) == len(step.units) else ", ".join(units)
                lines.append(f"{step.name} ({which}): {reason}")
        return lines

    def markdown(self, picture: str) -> str:
        """`picture`: a line about it, or the link to it."""
        return "\n".join(
            [
                "# Kernels on a GPU",
                "",
                f"{datetime.date.today()}, {', '.join(f'{k} {v}' for k, v in self.record.about.items())}; "
                f"units: {self.counts()}.",
                "",
                *([f"Earlier results were dropped: {self.record.dropped}.", ""] if self.record.dropped else []),
                *self._failed(),
                *self._not_run(),
                *self._environment(),
                *self._checks(),
                *self._products(),
                *self._timing(),
                *self._comparison(),
                picture,
                "",
            ]
        )

    def _failed(self) -> list[str]:
        rows = [(step, unit, one_line(o.reason)) for step, unit, o in self.record.with_status(FAILED)]
        return ["## Failed", "", *table(("step", "unit", "why"), rows)] if rows else []

    def _not_run(self) -> list[str]:
        lines = self.not_run()
        return ["## Not run", "", *(f"- {line}" for line in lines), ""] if lines else []

    def _environment(self) -> list[str]:
        found = self.figures("environment").get("machine")
        if not found:
            return []
        rows = [
            (name, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value)
            for name, value in found.items()
            if value is not None
        ]
        return ["## Machine", "", *table(("", ""), rows)]

    def _checks(self) -> list[str]:
        rows = [(unit, f"{f['cases']} cases") for unit, f in self.figures("exact").items()]
        rows += [(f"products: {unit}", "right") for unit in self.figures("products")]
        rows += [
            (f"compute-sanitizer {unit}", f"{f['operators']} operators, nothing found")
            for unit, f in self.figures("sanitizer").items()
        ]
        return ["## Checks that passed", "", *table(("check", "outcome"), rows)] if rows else []

    def _timing(self) -> list[str]:
        ours, peers = self.figures("timing"), self.figures("peers")
        peers |= {f"ThunderKittens {f['out_features']}x{f['in_features']} {f['tokens']}": f for f in self._kittens()}
        if not ours and not peers:
            return []
        rows = []
        for unit, figures in (ours | peers).items():
            bits = figures.get("bits_per_weight")
            gpu = sum(figures["kernels"].values()) if figures.get("kernels") else None
            rows.append(
                (
                    unit,
                    f"{bits:.2f}" if bits else "",
                    f"{figures['median']:.1f}",
                    f"{figures['lowest']:.1f}–{figures['highest']:.1f}" if "lowest" in figures else "",
                    f"{gpu:.1f}" if gpu else "",
                    f"{2 * weights_of(figures) / (gpu or figures['median']) / 1e3:.0f}" if "weights" in figures else "",
                )
            )
        return [
            "## Times, cold L2",
            "",
            "Medians. *Call* is what a caller waits for, between two events; *kernels* is the sum of the kernels' own "
            "times. The rate counts two bytes for each weight that is handled, in the kernels' time where it is known.",
            "",
            *table(("", "bits/weight", "call µs", "from–to", "kernels µs", "BF16 GB/s"), rows),
        ]

    def _products(self) -> list[str]:
        found = bars.rows(self.figures("product times"), gpu_of(self.device_name()))
        if not found:
            return []
        return [
            "## Products, cold L2",
            "",
            "Medians, in a CUDA graph of products that follow each other. *× bytes*: times that in which the memory "
            "gives the packed bytes, by its data sheet. *× cuBLAS*: how many times faster than F.linear in BF16.",
            "",
            *table(bars.HEAD, found),
        ]

    def _kittens(self) -> list[dict]:
        return list(self.figures("thunderkittens").values())

    def comparison(self) -> list:
        """Predicted against measured; empty where one of them is missing."""
        predicted = self.figures("prediction").get("kernels")
        gpu = gpu_of(self.device_name())
        return compare(self.figures("timing"), predicted["rows"], gpu) if predicted and gpu else []

    def device_name(self) -> str:
        return self.figures("environment").get("machine", {}).get("gpu", {}).get("name", "")

    def _comparison(self) -> list[str]:
        found = self.comparison()
        if not found:
            if self.device_name() and not gpu_of(self.device_name()):
                return [
                    f"No comparison: bench/model.py has no rates of {self.device_name()}, but of {', '.join(GPUS)}.",
                    "",
                ]
            return ["No comparison of predicted and measured: one of the two is missing.", ""]
        rows = [
            (c.unit, c.kernel, f"{c.predicted:.1f}", f"{c.measured:.1f}", f"{c.ratio:.2f}", c.limiter) for c in found
        ]
        return [
            "## Predicted and measured",
            "",
            "Predicted is the bound: the least time, with everything overlapped, without launch and tail. It knows "
            "nothing of latency, and so nothing of archives: one warp decodes a chunk of 2^20 weights.",
            "",
            *table(("", "kernel", "predicted µs", "measured µs", "× bound", "limiter"), rows),
        ]
