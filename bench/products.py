"""How long products with packed weights should take on an H100 and an H200: predicted, nothing here is measured.

    python bench/products.py [--json] [--plot FILE]

Over the linear layers of language models. The model is unweight_ext/tuning/predict.py: rates from data sheets, the
kernels' own way to share work out, and every overhead: launches, code table, pipeline, the sum of pieces. A product
follows its like, and where that is one weight (not experts), each is told which comes next. Bars: the time may be 1.1
(gate, up, down) or 1.3 (QKV, o) times that in which the memory gives the compressed bytes, up to 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.machine import machine  # noqa: E402
from unweight_ext.tuning.costs import ASSUMED, Assumptions  # noqa: E402
from unweight_ext.tuning.predict import (  # noqa: E402
    Config,
    Prediction,
    Product,
    best,
    predict,
    predict_scratch,
)
from unweight_ext.tuning.rates import GPUS  # noqa: E402

LAYOUTS = ("huffman", "nibble")
FEW, MANY = (1, 8, 16, 32, 64), (128, 256, 1024)
MISSING_TOOL = 3
EXPERTS, EXPERTS_OF_TOKEN = 8, 2


@dataclass(frozen=True)
class Layer:
    """A product of a model: weights that are multiplied with the same x, in one launch."""

    model: str
    name: str
    shapes: tuple[tuple[int, int], ...]  # (out_features, in_features)
    bar: float  # of the predicted time, up to 64 tokens: times that of the compressed bytes
    experts: bool = False  # each shape is a stack of EXPERTS

    def product(self, tokens: int) -> Product:
        if not self.experts:
            return Product.of(tokens, *self.shapes)
        # Evenly routed: the most experts are hit.
        hit = min(EXPERTS, EXPERTS_OF_TOKEN * tokens)
        each = -(-EXPERTS_OF_TOKEN * tokens // hit)
        return Product(self.shapes, (each,) * hit + (0,) * (EXPERTS - hit))


def layers_of(model: str, hidden: int, ffn: int, qkv: int, heads: int, experts: bool = False) -> list[Layer]:
    """`qkv`: outputs of q, k and v together; `heads`: inputs of o."""
    up = (ffn, hidden)
    return [
        Layer(model, "gate", (up,), 1.1, experts),
        Layer(model, "gate+up", (up, up), 1.1, experts),
        Layer(model, "down", ((hidden, ffn),), 1.1, experts),
        Layer(model, "QKV", ((qkv, hidden),), 1.3),
        Layer(model, "o", ((hidden, heads),), 1.3),
    ]


LAYERS = (
    *layers_of("Llama-3.1-8B", 4096, 14336, 6144, 4096),
    *layers_of("Llama-3.1-70B", 8192, 28672, 10240, 8192),
    *layers_of("Qwen3-32B", 5120, 25600, 10240, 8192),
    *layers_of("Mixtral-8x7B", 4096, 14336, 6144, 4096, experts=True),
)


@dataclass(frozen=True)
class Row:
    """One predicted product."""

    layer: Layer
    gpu: str
    layout: str
    tokens: int
    config: Config | None  # None: decoded to scratch
    prediction: Prediction  # hinted where a product can be
    unhinted: Prediction

    @property
    def hinted(self) -> bool:
        return self.config is not None and self.layer.product(self.tokens).takes_hint

    @property
    def holds(self) -> bool | None:
        """The bar; None where there is none."""
        return self.prediction.ratio <= self.layer.bar if self.tokens <= FEW[-1] else None

    def for_json(self) -> dict:
        found = self.prediction
        return {
            **{"model": self.layer.model, "product": self.layer.name, "shapes": self.layer.shapes},
            **{"gpu": self.gpu, "layout": self.layout, "tokens": self.tokens},
            "config": self.config and self.config.tokens,
            "microseconds": found.microseconds,
            "ratio": found.ratio,
            "bar": self.layer.bar if self.tokens <= FEW[-1] else None,
            "holds": self.holds,
            "against_cublas": found.against_cublas,
            "hinted": self.hinted,
            "microseconds_unhinted": self.unhinted.microseconds,
            **asdict(found),
        }


def row_of(layer: Layer, gpu: str, layout: str, tokens: int, assumed: Assumptions = ASSUMED) -> Row:
    product = layer.product(tokens)
    config = best(max(product.tokens), layout, [product], GPUS[gpu])
    if config is None:
        scratch = predict_scratch(product, layout, GPUS[gpu], assumed)
        return Row(layer, gpu, layout, tokens, None, scratch, scratch)
    unhinted = predict(product, layout, config, GPUS[gpu], assumed)
    if not product.takes_hint:
        return Row(layer, gpu, layout, tokens, config, unhinted, unhinted)
    hinted = predict(product, layout, config, GPUS[gpu], assumed, hinted=True)
    return Row(layer, gpu, layout, tokens, config, hinted, unhinted)


def rows() -> Iterator[Row]:
    for layer in LAYERS:
        for layout in LAYOUTS:
            for gpu in GPUS:
                for tokens in (*FEW, *MANY):
                    yield row_of(layer, gpu, layout, tokens)


def table(head: list[str], lines: list[list[str]], texts: int) -> str:
    """Markdown; the first `texts` columns are left-aligned."""
    align = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, align, *lines))


def grouped(found: list[Row], tokens: tuple[int, ...]) -> Iterator[list[Row]]:
    """The rows of those numbers of tokens, one list for each layer, layout and GPU."""
    wanted = [row for row in found if row.tokens in tokens]
    for at in range(0, len(wanted), len(tokens)):
        yield wanted[at : at + len(tokens)]


def few_table(found: list[Row]) -> str:
    """Up to 64 tokens: against the bars."""
    head = ["model", "product", "layout", "GPU", "bar", *(f"M={m}: µs (×; no hint)" for m in FEW), "limiter"]
    head += ["busiest", "L2 TB/s", "× cuBLAS, M=16", "M=64"]
    lines = []
    for members in grouped(found, FEW):
        by_tokens = {row.tokens: row.prediction for row in members}
        first, most = members[0], by_tokens[64]
        missed = [str(row.tokens) for row in members if not row.holds]
        verdict = f"{first.layer.bar}: " + (f"**missed** at {', '.join(missed)}" if missed else "holds")
        line = [first.layer.model, first.layer.name, first.layout, first.gpu, verdict]
        for row in members:
            ratio = f"{row.prediction.ratio:.2f}" if row.hinted else "–"
            line.append(f"{row.prediction.microseconds:.1f} ({ratio}; {row.unhinted.ratio:.2f})")
        line += [most.limiter, f"{most.busiest:.2f}", f"{most.l2_terabytes:.1f}"]
        line += [f"{by_tokens[m].against_cublas:.2f}" for m in (16, 64)]
        lines.append(line)
    return table(head, lines, 5)


def many_table(found: list[Row]) -> str:
    """From 128 tokens on: against cuBLAS."""
    head = ["model", "product", "layout", "GPU"]
    head += [text for m in MANY for text in (f"M={m}: way", "µs", "× cuBLAS", "L2 TB/s")]
    lines = []
    for members in grouped(found, MANY):
        first = members[0]
        line = [first.layer.model, first.layer.name, first.layout, first.gpu]
        for row in members:
            found_here = row.prediction
            line += [str(row.config or "scratch"), f"{found_here.microseconds:.0f}"]
            line += [f"{found_here.against_cublas:.2f}", f"{found_here.l2_terabytes:.1f}"]
        lines.append(line)
    return table(head, lines, 4)


def parts_table(found: list[Row]) -> str:
    """What the time is made of, at 16 tokens and `huffman`."""
    model = LAYERS[0].model
    shown = [row for row in found if (row.layer.model, row.tokens, row.layout) == (model, 16, "huffman")]
    names = list(shown[0].prediction.parts)
    lines = []
    for row in shown:
        for hint, p in (("yes", row.prediction), ("no", row.unhinted)):
            spent = [*(p.parts[name] for name in names), p.microseconds, p.hbm]
            lines.append([row.layer.name, row.gpu, hint, *(f"{part:.2f}" for part in spent)])
    return table([f"{model}, M=16", "GPU", "hint", *names, "µs in all", "HBM alone"], lines, 3)


def summary(found: list[Row]) -> str:
    """How many predictions are within their bars, and how many would be if something were otherwise."""
    judged = [row for row in found if row.holds is not None]

    def holding(assumed: Assumptions) -> int:
        return sum(bool(row_of(r.layer, r.gpu, r.layout, r.tokens, assumed).holds) for r in judged)

    lines = {
        "as the kernels are": sum(bool(row.holds) for row in judged),
        "if no product were told which weight comes next": sum(r.unhinted.ratio <= r.layer.bar for r in judged),
        "if x came from the L2 no faster than weights": holding(replace(ASSUMED, x_takes_l2=True)),
    }
    return f"Of {len(judged)} predictions, within their bars: {', '.join(f'{n} {how}' for how, n in lines.items())}."


def picture(found: list[Row]) -> Figure:
    """The ratio to the compressed bytes' time, by layer, with its bar."""
    from matplotlib.figure import Figure

    names = [f"{layer.model} {layer.name}" for layer in LAYERS]
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, layout in zip(figure.subplots(1, 2, sharey=True), LAYOUTS, strict=True):
        for gpu, color in zip(GPUS, ("tab:blue", "tab:orange"), strict=True):
            for tokens, marker in ((16, "o"), (64, "s")):
                shown = [r for r in found if (r.layout, r.gpu, r.tokens) == (layout, gpu, tokens)]
                ratios = [row.prediction.ratio for row in shown]
                axes.plot(ratios, range(len(names)), marker, color=color, alpha=0.8, label=f"{gpu}, M = {tokens}")
        for line, layer in enumerate(LAYERS):
            axes.plot(
                [layer.bar, layer.bar], [line - 0.4, line + 0.4], color="black", label="bar" if not line else None
            )
        axes.set(title=layout, xlabel="predicted time, that of the compressed bytes is 1")
        axes.set_yticks(range(len(names)), names)
        axes.grid(alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.axes[1].legend(fontsize="small")
    figure.suptitle("Products with packed weights (predicted, not measured)")
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no such folder")
    if options.plot and find_spec("matplotlib") is None:
        print("error: --plot: matplotlib isn't installed: pip install matplotlib", file=sys.stderr)
        return MISSING_TOOL
    found = list(rows())
    if options.plot:
        picture(found).savefig(options.plot, dpi=100)
    if options.json:
        command = shlex.join(["python", *sys.argv])
        about = {"predicted": True, "machine": machine(), "command": command, "assumed": asdict(ASSUMED)}
        print(json.dumps({**about, "rows": [row.for_json() for row in found]}, indent=2))
    else:
        print(f"Predicted, not measured. {machine()}\n\n{summary(found)}\n")
        print("\n\n".join([few_table(found), parts_table(found), many_table(found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
