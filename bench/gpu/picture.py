"""rates.png: what every timed kernel reaches, with its bound and torch's copy beside it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .compare import weights_of
from .report import Report

FILE = "rates.png"


def bars(report: Report) -> dict[str, tuple[float, float | None]]:
    """unit -> BF16 GB/s measured, and predicted where that is known. Call times where kernels weren't timed."""
    predicted: dict[str, float] = {}
    for one in report.comparison():
        predicted[one.unit] = predicted.get(one.unit, 0.0) + one.predicted
    found = {}
    for unit, figures in report.figures("timing").items():
        gigabytes = 2e-3 * weights_of(figures)
        spent = sum(figures["kernels"].values()) or figures["median"]
        found[unit] = (gigabytes / spent, gigabytes / predicted[unit] if unit in predicted else None)
    return found


def draw(report: Report, folder: Path) -> str:
    """Writes the picture. Returns the line for the report: a link, or why there is none."""
    found = bars(report)
    if not found:
        return "No picture: nothing was timed."
    if find_spec("matplotlib") is None:
        return "No picture: matplotlib isn't installed."
    from matplotlib.figure import Figure

    names = list(found)[::-1]
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [found[name][0] for name in names], color="tab:blue", height=0.7, label="measured")
    marks = [(found[name][1], name) for name in names if found[name][1]]
    if marks:
        axes.plot(*zip(*marks, strict=True), "k|", markersize=11, markeredgewidth=2, label="bound, predicted")
    copies = [2e-3 * f["weights"] / f["median"] for u, f in report.figures("peers").items() if u.startswith("copy ")]
    if copies:
        axes.axvline(max(copies), color="tab:orange", linestyle="--", label="torch copy of BF16")
    device = report.device_name() or report.record.about["device"]
    axes.set(xlabel="GB/s, two bytes for each weight", title=f"Kernels with a cold L2, {device}")
    axes.legend(loc="lower right", fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(folder / FILE, dpi=130)
    return f"![rates]({FILE})"
