"""The picture of `inspect --plot`: bits per weight of each tensor against its floor."""

from importlib.util import find_spec
from pathlib import Path

from .errors import CheckpointError, at
from .inspection import Inspection

_COLORS = {"archive": "#1b9e77", "huffman": "#7570b3", "nibble": "#d95f02", "stored": "#888888", "estimate": "#1b9e77"}


def check_plot(target: str) -> None:
    """Raises CheckpointError unless a picture can be drawn to `target`; called before the long work."""
    if find_spec("matplotlib") is None:
        raise CheckpointError("--plot needs matplotlib: pip install matplotlib (or unweight-ext[plot])")
    if not Path(target).absolute().parent.is_dir():
        raise CheckpointError(at(target, "its folder doesn't exist"))
    if Path(target).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CheckpointError(at(target, "expected a name that ends in .png, .svg or .pdf"))


def plot(result: Inspection, target: str) -> None:
    """Draws one point for each BF16 matrix, its area by the tensor's size."""
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float, float]]] = {}
    for t in result.tensors:
        bits = t.bits_per_weight if t.estimate is None else t.estimate
        if t.floor is not None and bits is not None and len(t.shape) >= 2:
            kind = t.layout if t.estimate is None else "estimate"
            points.setdefault(kind, []).append((t.floor, bits, 4 + t.original_bytes / 2e5))
    if not points:
        raise CheckpointError(at(result.path, "nothing to plot: no BF16 matrices, or --fast"))
    # At 16 bits they would squeeze the others into a line.
    left_out = len(points.pop("stored")) if len(points) > 1 and "stored" in points else 0
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for kind, values in points.items():
        floors, bits, areas = zip(*values, strict=True)
        label = f"{kind} ({len(values)})"
        axes.scatter(floors, bits, s=areas, alpha=0.5, label=label, color=_COLORS.get(kind), edgecolors="none")
    low = min(v[0] for values in points.values() for v in values) - 0.05
    high = max(v[0] for values in points.values() for v in values) + 0.05
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="floor: 8 + exponent entropy")
    if left_out:
        axes.plot([], [], " ", label=f"not shown: {left_out} at 16 bits, which packing doesn't make smaller")
    axes.set(xlim=(low, high), xlabel="floor (bits per weight)", ylabel="bits per weight", title=Path(result.path).name)
    for handle in axes.legend(loc="best", frameon=False).legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([40])
    figure.savefig(target, dpi=150)
