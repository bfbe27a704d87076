"""The fused CPU linear beside F.linear in BF16: same threads, pinned; cold weights; medians of alternating runs.

    python bench/linear_cpu.py [--json] [--threads N] [--runs N] [--huge-pages]

Weights are Student-t(5) * 0.02, more than 300 MB of copies of them in turns, so that none comes from a cache. F.linear
takes oneDNN's AVX-512 kernels, which are slow for one token. So at M = 1 the table also has the fastest BF16 product
there is in torch: ATen's own gemv, which a second process gets with ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2.

Packed weights lie in memory as `pack`, `compress_model` and loading leave them, in huge pages; F.linear's as torch
allocates them, or in huge pages too with --huge-pages; those of the gemv always in huge pages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SHAPES = ((4096, 4096), (14336, 4096))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAYOUTS = ("nibble", "huffman")
BARS = {  # times F.linear
    "nibble": {1: 1.8, 4: 1.8, 16: 1.3, 64: 1.0},
    "huffman": {1: 1.4},
}
GEMV_BAR = 1.1  # nibble at M = 1, times the fastest raw product
COLD_BYTES = 300 << 20
GEMV_TURNS = 4
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch's own switch


def pin_threads(threads: int, huge_pages: bool) -> None:
    """Starts this program again if need be: OpenMP and torch read their variables once, when torch is loaded."""
    wanted = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    if huge_pages:
        wanted |= HUGE_PAGES
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def copies(tensor):
    """The tensor as often as it takes to fill COLD_BYTES."""
    return [tensor.clone() for _ in range(COLD_BYTES // tensor.nbytes + 1)]


def packed_copies(packed):
    """Likewise, in memory as `pack`, `compress_model` and loading give it."""
    import unweight_ext

    return [unweight_ext.pad_row_bytes(packed, packed.shape[1]) for _ in range(COLD_BYTES // packed.nbytes + 1)]


def seconds(run: Callable[[int], object], turn: int) -> float:
    start = time.perf_counter()
    run(turn)
    return time.perf_counter() - start


def serve_gemv(out_features: int, in_features: int, runs: int) -> None:
    """The second process: for each line of input, one line with the times of `runs` products."""
    import torch
    from torch.nn.functional import linear

    weights = copies(torch.randn(out_features, in_features).bfloat16())
    x = torch.randn(1, in_features).bfloat16()
    turn = 0
    for _ in sys.stdin:
        times = []
        for _ in range(runs + 1):
            times.append(seconds(lambda i: linear(x, weights[i % len(weights)]), turn))
            turn += 1
        print(json.dumps(times[1:]), flush=True)  # the first one wakes the threads


class Gemv:
    """ATen's gemv in a process of its own, timed while this one is idle."""

    def __init__(self, shape: tuple[int, int], runs: int) -> None:
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", **HUGE_PAGES}
        command = [sys.executable, __file__, "--gemv", *map(str, shape), "--runs", str(runs)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def times(self) -> list[float]:
        time.sleep(0.05)  # threads of both processes spin for a while after their work
        self.process.stdin.write("\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process for ATen's gemv ended with status {self.process.wait()}")
        time.sleep(0.05)
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(shape: tuple[int, int], runs: int) -> list[dict]:
    import torch
    from torch.nn.functional import linear

    import unweight_ext

    out_features, in_features = shape
    weight = (torch.distributions.StudentT(5.0).sample(shape) * 0.02).bfloat16()
    raw = copies(weight)
    packed = {}
    for layout in LAYOUTS:
        one = unweight_ext.pack(weight, layout)
        assert unweight_ext.info(one).layout == layout, f"these weights don't fit {layout}"
        packed[layout] = packed_copies(one)
    gemv = Gemv(shape, runs)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, in_features).bfloat16()
        exact = x.double() @ weight.double().T

        def product(weights: list, x=x) -> Callable[[int], torch.Tensor]:
            fused = weights is not raw
            return lambda i: (torch.ops.unweight.linear if fused else linear)(x, weights[i % len(weights)])

        candidates = {"F.linear": product(raw), **{name: product(packed[name]) for name in LAYOUTS}}
        for name, run in candidates.items():
            error = (run(0).double() - exact).norm() / exact.norm()
            assert error < 5e-3, f"{name} is wrong: relative error {error:.1e} at M = {tokens}"
        times = {name: [] for name in candidates}
        if tokens == 1:
            times["ATen gemv"] = []
        share = runs if tokens <= 16 else max(5, runs // 4)
        for turn in range(share):
            for name, run in candidates.items():
                times[name].append(seconds(run, turn))
            if tokens == 1 and turn % max(1, share // GEMV_TURNS) == 0:
                times["ATen gemv"] += gemv.times()
                for run in candidates.values():
                    run(turn + 1)  # wakes the threads
        ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
        rows.append({"out_features": out_features, "in_features": in_features, "tokens": tokens, "ms": ms})
    gemv.close()
    return rows


def summarise(row: dict) -> dict:
    """Adds what the bars are about."""
    ms, tokens = row["ms"], row["tokens"]
    row["times_f_linear"] = {name: ms["F.linear"] / ms[name] for name in LAYOUTS}
    held = [row["times_f_linear"][name] >= bars[tokens] for name, bars in BARS.items() if tokens in bars]
    if "ATen gemv" in ms:
        row["times_best_raw"] = {name: min(ms["F.linear"], ms["ATen gemv"]) / ms[name] for name in LAYOUTS}
        held.append(row["times_best_raw"]["nibble"] >= GEMV_BAR)
    row["bars_hold"] = all(held) if held else None
    return row


def print_table(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ms, and times F.linear")
    for column in (
        "N x K",
        "M",
        "F.linear",
        "nibble",
        "x",
        "huffman",
        "x",
        "ATen gemv",
        "nibble x",
        "huffman x",
        "bars",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        ms, ratio = row["ms"], row["times_f_linear"]
        best = row.get("times_best_raw")
        table.add_row(
            f"{row['out_features']} x {row['in_features']}",
            str(row["tokens"]),
            f"{ms['F.linear']:.3f}",
            f"{ms['nibble']:.3f}",
            f"{ratio['nibble']:.2f}",
            f"{ms['huffman']:.3f}",
            f"{ratio['huffman']:.2f}",
            *([f"{ms['ATen gemv']:.3f}", f"{best['nibble']:.2f}", f"{best['huffman']:.2f}"] if best else [""] * 3),
            {True: "hold", False: "FAIL", None: ""}[row["bars_hold"]],
        )
    Console(width=120).print(table)
    bars = "; ".join(
        f"{layout} {', '.join(f'{bar} at M = {m}' for m, bar in bars.items())}" for layout, bars in BARS.items()
    )
    print(f"bars, times F.linear: {bars}; nibble {GEMV_BAR} times the faster of F.linear and ATen's gemv at M = 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--runs", type=int, default=41, help="timed runs at M <= 16, a quarter above (default 41)")
    parser.add_argument("--huge-pages", action="store_true", help="F.linear's weights in huge pages too")
    parser.add_argument("--gemv", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gemv:
        return serve_gemv(*options.gemv, options.runs)
    pin_threads(options.threads, options.huge_pages)
    cores = os.sched_getaffinity(0)

    from machine import machine

    rows = [summarise(row) for shape in SHAPES for row in measure(shape, options.runs)]
    os.sched_setaffinity(0, cores)  # OpenMP has bound this thread to one of them
    if options.json:
        print(json.dumps({"machine": machine(), "command": " ".join(["python", *sys.argv]), "rows": rows}, indent=2))
    else:
        print(machine())
        print_table(rows)


if __name__ == "__main__":
    main()
