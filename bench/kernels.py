"""What bounds each CUDA kernel on an H100 and an H200, predicted: nothing here is measured on a GPU, none is needed.

    python bench/kernels.py [--json] [--plot FILE] [--places N] [CASE ...]

For each weight: bytes of memory, wavefronts of shared memory and PTX instructions, counted by the tests' interpreter
on small packed matrices (bench/simulated.py); SASS instructions by pipe, estimated from those (bench/sass_places.py).
From them and the rates of bench/model.py come the bound, in BF16 GB/s that the whole GPU can't pass, and what it is
that limits. The bound assumes that all latency is hidden: "warps" are those that an SM holds, "a warp" is how many
instructions each must issue a clock to get there. All cases take a few minutes. Ends with 3 where a tool is missing.

Products are in bench/products.py. Their instructions are counted in the loop alone: what is inlined into the fused
kernels through lambdas has other places in SASS than in PTX, so they can't be estimated from what the interpreter ran.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import cuda_toolkit  # noqa: E402
import native_build  # noqa: E402
from cuda_toolkit import ToolkitError  # noqa: E402

from bench import sass_places, simulated  # noqa: E402
from bench.machine import machine  # noqa: E402
from bench.model import GPUS, PIPES, Bound, Demand, bound, resident_warps  # noqa: E402
from bench.simulated import Cost  # noqa: E402

MISSING_TOOL = 3
# Not worth a row: what a further weight costs there rounds to nothing.
LEAST_SHARE = 0.01


def require_tools(plot: bool) -> None:
    """Raises ToolkitError naming what is missing."""
    nvcc, nvdisasm = cuda_toolkit.find_nvcc(), cuda_toolkit.find_program("nvdisasm")
    if nvcc is None:
        raise ToolkitError(f"{cuda_toolkit.NVCC_NOT_FOUND}: {cuda_toolkit.INSTALL_HINT}")
    if nvdisasm is None:
        raise ToolkitError("nvdisasm is neither in site-packages nor on the path: pip install nvidia-cuda-nvdisasm")
    if find_spec("pybind11") is None:
        raise ToolkitError("pybind11 isn't installed: pip install pybind11")
    if plot and find_spec("matplotlib") is None:
        raise ToolkitError("--plot: matplotlib isn't installed: pip install matplotlib")


def compiled_kernels(kernels: set[str]) -> tuple[dict[str, list], dict[str, int]]:
    """Kernel -> places and pipes of its SASS instructions; kernel -> registers. Raises ToolkitError."""
    found: dict[str, list] = {}
    registers: dict[str, int] = {}
    # Files that spell a name that is wanted first: the others may make it by a macro.
    spelled = {source: sum(name in source.read_text() for name in kernels) for source in native_build.cuda_sources()}
    for source in sorted(spelled, key=spelled.__getitem__, reverse=True):
        if kernels <= set(found):
            break
        compiled = sass_places.compile_file(source)
        found.update(sass_places.located(compiled.text))
        registers.update(compiled.registers)
    return found, registers


def row_of(case: str, kernel: str, cost: Cost, located: list, registers: int) -> dict:
    """One row of the table, for JSON. `located`: the kernel's instructions, as sass_places has them."""
    warps = resident_warps(cost.threads, registers, cost.shared_bytes)
    estimate = sass_places.estimate(located, cost.places)
    demand = Demand(cost.bytes_read + cost.bytes_written, cost.wavefronts, estimate.operations)
    bounds = {name: bound(demand, gpu) for name, gpu in GPUS.items()}
    return {
        "case": case,
        "kernel": kernel,
        "demand": asdict(demand),
        "l2_bytes": cost.bytes_asked,
        "ptx_instructions": cost.instructions,
        "sass_without_place": estimate.unmatched,
        "conflicts_per_64_weights": 64 * (cost.wavefronts - cost.conflict_free),
        "warps": warps,
        "bounds": {
            name: {**bound_row(one), "instructions_per_warp": one.instructions_per_warp(estimate.operations, warps)}
            for name, one in bounds.items()
        },
        "places": [
            {"place": " < ".join(f"{file}:{line}" for file, line in place), "sass_instructions": count}
            for place, count in sass_places.most_of(located, cost.places)
        ],
    }


def bound_row(one: Bound) -> dict:
    return {
        "limiter": one.limiter,
        "bf16_gb_per_second": one.bf16_gb_per_second,
        "share_of_hbm": one.share_of_hbm,
        "clocks_per_weight": dict(one.clocks),
    }


def rows_of(cases: list[str]) -> list[dict]:
    costs = {}
    for case in cases:
        print(f"{case}", file=sys.stderr, flush=True)
        measured = simulated.measure(case)
        least = LEAST_SHARE * sum(cost.instructions for cost in measured.values())
        costs.update({(case, kernel): cost for kernel, cost in measured.items() if cost.instructions > least})
    located, registers = compiled_kernels({kernel for _, kernel in costs})
    return [row_of(case, kernel, cost, located[kernel], registers[kernel]) for (case, kernel), cost in costs.items()]


SHOWN_PIPES = ("ALU", "FMA-heavy", "LSU", "XU")
HEAD = (
    *("case", "kernel", "HBM B", "L2 B", "shared wavefronts /64", "conflicts /64", "PTX"),
    *(*SHOWN_PIPES, "SASS in all"),
    *("warps", *(text for name in GPUS for text in (f"{name} GB/s", "limiter", "a warp"))),
)


def cells(row: dict) -> list[str]:
    """One line of the table."""
    demand, pipes = row["demand"], row["demand"]["operations"]
    sass = [f"{pipes.get(pipe, 0):.2f}" for pipe in SHOWN_PIPES] + [f"{sum(pipes.values()):.2f}"]
    line = [row["case"], row["kernel"].removeprefix("unweight_"), f"{demand['hbm_bytes']:.2f}"]
    line += [f"{row['l2_bytes']:.2f}"]
    line += [f"{64 * demand['shared_wavefronts']:.2f}", f"{row['conflicts_per_64_weights']:.2f}"]
    line += [f"{row['ptx_instructions']:.2f}", *sass]
    line += [str(row["warps"])]
    for one in row["bounds"].values():
        line += [f"{one['bf16_gb_per_second']:.0f}", one["limiter"], f"{one['instructions_per_warp']:.2f}"]
    return line


def markdown(rows: list[dict]) -> str:
    lines = [HEAD, ["---"] * 2 + ["---:"] * (len(HEAD) - 2), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def places(row: dict, most: int) -> str:
    """The lines that the most instructions come from, with where they were inlined."""
    lines = [f"{row['case']}, {row['kernel']}: SASS instructions for a weight, by place"]
    lines += [f"  {one['sass_instructions']:6.2f}  {one['place']}" for one in row["places"][:most]]
    return "\n".join(lines)


def picture(rows: list[dict]) -> Figure:
    """For each kernel the time that each part takes, against that of an H200's memory: what is right of a GPU's line
    keeps the kernel from the speed of its memory."""
    from matplotlib.figure import Figure

    names = [f"{row['case']}: {row['kernel'].removeprefix('unweight_')}" for row in rows]
    figure = Figure(figsize=(10, 1.6 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for gpu, style in (("H200", "-"), ("H100", "--")):
        where = GPUS["H200"].hbm_bytes / GPUS[gpu].hbm_bytes
        axes.axvline(where, color="black", linestyle=style, linewidth=1, label=f"HBM of an {gpu}")
    resources = ("shared memory", "issue", *PIPES)
    for resource, marker in zip(resources, "s|ovx^D", strict=True):
        clocks = [row["bounds"]["H200"]["clocks_per_weight"] for row in rows]
        there = [(c[resource] / c["HBM"], line) for line, c in enumerate(clocks) if c[resource] > 0]
        if there:
            axes.plot(*zip(*there, strict=True), marker, markersize=7, alpha=0.8, label=resource)
    axes.set(xlabel="time, that of an H200's memory is 1", title="What bounds each kernel (predicted)", xscale="log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases_help = '"unpack huffman", say (default: all; a wrong name lists them)'
    parser.add_argument("cases", nargs="*", metavar="CASE", help=cases_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture (needs matplotlib)")
    parser.add_argument("--places", type=int, default=0, metavar="N", help="a kernel's N costliest lines, too")
    options = parser.parse_args(arguments)
    known = list(simulated.cases())
    if unknown := [case for case in options.cases if case not in known]:
        # One a line: a name has a comma.
        parser.error("\n  ".join([f"{unknown[0]!r}: expected one of", *known]))
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot {options.plot}: there is no such folder")
    try:
        require_tools(options.plot is not None)
        rows = rows_of(options.cases or known)
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISSING_TOOL
    if options.plot:
        picture(rows).savefig(options.plot, dpi=100)
    if options.json:
        command = shlex.join(["python", *sys.argv])
        print(json.dumps({"predicted": True, "machine": machine(), "command": command, "rows": rows}, indent=2))
    else:
        print(f"Predicted, not measured. {machine()}\n")
        print(markdown(rows))
        for row in rows if options.places else ():
            print(f"\n{places(row, options.places)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
