"""What is asked of products on a GPU, and the table of measured times with it, and with predicted ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MLP = ("gate", "gate+up", "down")  # the bars up to 64 rows are for these


def bar_of(layout: str, product: str, tokens: int) -> float | None:
    """The least speed, times cuBLAS; None where nothing is asked for."""
    if tokens >= 128:
        return {"nibble": 0.97, "huffman": 0.85}[layout]
    if product not in MLP:
        return None
    if tokens <= 16:
        return {"nibble": 1.28, "huffman": 1.40}[layout]
    return 1.25 if tokens == 64 else None


def verdict(layout: str, product: str, tokens: int, speed: float) -> str:
    """PASS or MISS, with the bar."""
    bar = bar_of(layout, product, tokens)
    return "" if bar is None else f"{'PASS' if speed >= bar else 'MISS'} (≥ {bar:.2f})"


def rows(figures: Mapping[str, Mapping[str, Any]], gpu: object | None) -> list[tuple[str, ...]]:
    """Of the step "product times": unit -> figures. `gpu`: rates for predictions, None where they aren't known."""
    found = []
    for unit, one in figures.items():
        layout, model, product = unit.split(" ")
        for tokens, spent in one["times"].items():
            alone = spent["microseconds"]
            time = spent.get("hinted", alone)  # there is none for experts, several weights, many rows
            speed = spent["cublas"] / time
            read = spent.get("packed_bytes", one["packed_bytes"])  # of experts, those that are hit
            bytes_time = read / (gpu.hbm_gb_per_second * 1e3) if gpu else None
            line = [f"{model} {product}", layout, tokens, predicted(unit, int(tokens), gpu)]
            line += [f"{alone:.1f}", f"{time:.1f}", f"{time / bytes_time:.2f}" if bytes_time else ""]
            line += [f"{spent['cublas']:.1f}", f"{speed:.2f}", verdict(layout, product, int(tokens), speed)]
            found.append(tuple(line))
    return found


# "hinted": each product knows the weight of the next; the columns behind it are of that.
HEAD = ("product", "layout", "M", "predicted µs", "alone µs", "hinted µs", "× bytes", "cuBLAS µs", "× cuBLAS", "bar")


def predicted(unit: str, tokens: int, gpu: object | None) -> str:
    """Microseconds, or nothing where the GPU's rates aren't known."""
    if gpu is None:
        return ""
    from bench.gpu.product_times import layer_of
    from bench.products import row_of

    return f"{row_of(layer_of(unit), gpu.name, unit.split(' ')[0], tokens).prediction.microseconds:.1f}"
