"""`unweight tune --explain`: what a product should take, way by way, and what limits it. Needs no GPU and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .choices import bucket_of, default_choice
from .predict import Config, Prediction, Product, candidates, predict, predict_scratch
from .rates import GPUS


@dataclass(frozen=True)
class Way:
    """One way to do the product."""

    name: str
    config: Config | None
    prediction: Prediction


@dataclass(frozen=True)
class Explanation:
    """Of y = x · Wᵀ, x [tokens, in_features], W [out_features, in_features] in `layout`."""

    out_features: int
    in_features: int
    tokens: int
    layout: str
    gpu: str
    ways: tuple[Way, ...]
    chosen: Way

    def for_json(self) -> dict[str, Any]:
        return {
            **{"out_features": self.out_features, "in_features": self.in_features, "tokens": self.tokens},
            **{"layout": self.layout, "gpu": self.gpu, "predicted": True, "bucket": bucket_of(self.tokens)},
            "chosen": self.chosen.name,
            "ways": [
                {
                    "name": way.name,
                    "microseconds": way.prediction.microseconds,
                    "ratio_to_compressed_bytes": way.prediction.ratio,
                    "against_cublas": way.prediction.against_cublas,
                    "limiter": way.prediction.limiter,
                    "parts": dict(way.prediction.parts),
                    "l2_terabytes_per_second": way.prediction.l2_terabytes,
                }
                for way in self.ways
            ],
        }

    def text(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        found = self.chosen.prediction
        lines = [
            f"{shape}, {self.layout}, {self.tokens} rows of x, on an {self.gpu} (predicted, not measured):",
            f"  chosen: {self.chosen.name}, limited by {found.limiter}",
            f"  its bytes alone would take {found.hbm:.1f} µs, cuBLAS with BF16 weights {found.cublas:.1f} µs",
            "",
            f"  {'way':<12} {'µs':>8} {'× bytes':>8} {'× cuBLAS':>9}  limiter",
        ]
        for way in self.ways:
            p = way.prediction
            mark = "*" if way is self.chosen else " "
            cells = f"{p.microseconds:>8.1f} {p.ratio:>8.2f} {p.against_cublas:>9.2f}"
            lines.append(f"{mark} {way.name:<12} {cells}  {p.limiter}")
        parts = ", ".join(f"{name} {spent:.2f}" for name, spent in found.parts.items())
        return "\n".join([*lines, "", f"  µs of {self.chosen.name}: {parts}"])


def explain(out_features: int, in_features: int, tokens: int, layout: str, gpu: str) -> Explanation:
    """All ways for a product, with the one that runs where nothing was measured. Raises ValueError."""
    for name, value in (("N", out_features), ("K", in_features), ("M", tokens)):
        if value < 1:
            raise ValueError(f"{name}: {value}, expected at least 1")
    if gpu not in GPUS:
        raise ValueError(f"gpu: {gpu!r}, expected one of {', '.join(GPUS)}")
    product, rates = Product.of(tokens, (out_features, in_features)), GPUS[gpu]
    ways = [Way(str(c), c, predict(product, layout, c, rates)) for c in candidates(tokens)]
    ways.append(Way("scratch", None, predict_scratch(product, layout, rates)))
    choice = default_choice(layout, tokens)
    chosen = next(way for way in ways if way.config == choice)
    return Explanation(out_features, in_features, tokens, layout, gpu, tuple(ways), chosen)
