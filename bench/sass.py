"""Instructions per weight in the hot loop of each kernel, by pipe, counted in what ptxas makes of it. Needs no GPU.

    python bench/sass.py [--json] [FILE.cu ...]

Loops and weights come from comments in the files (tools/check_cubin.py); a kernel without them has – in the table. What
an inner loop, a patch or a report adds isn't in a number. "budget" is the most that the tests allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import check_cubin
import native_build
import sass
from cuda_toolkit import INSTALL_HINT, NVCC_NOT_FOUND, ToolkitError

COLUMNS = ("ALU", "FMA-heavy", "LSU", "XU")


def measure(sources: list[Path]) -> list[dict]:
    """A row per kernel: `pipes` and `total` are instructions per weight; None where the file names no hot loop.

    Raises ToolkitError without nvcc or nvdisasm.
    """
    nvcc = native_build.find_nvcc()
    if nvcc is None:
        raise ToolkitError(f"{NVCC_NOT_FOUND}: {INSTALL_HINT}")
    rows = []
    for source in sources:
        compiled = check_cubin.compile_file(nvcc.path, source)
        loops = {loop.kernel: loop for loop in compiled.hot_loops()}
        registers = compiled.registers()
        for name, kernel in compiled.kernels.items():
            loop = loops.get(name)
            rows.append(
                {
                    "kernel": name,
                    "file": source.name,
                    "registers": registers[name],
                    "instructions": sum(1 for _ in kernel.instructions()),
                    "weights": loop and loop.weights,
                    "total": loop and loop.per_weight,
                    "budget": loop and loop.budget,
                    "pipes": loop and {pipe: loop.pipes[pipe] / loop.weights for pipe in sass.PIPE_NAMES},
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """Markdown."""
    heads = ["kernel", "registers", *COLUMNS, "other", "total", "budget"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        if row["pipes"] is None:
            counts = ["–"] * (len(heads) - 2)
        else:
            named = [row["pipes"][pipe] for pipe in COLUMNS]
            numbers = [*named, row["total"] - sum(named), row["total"]]
            counts = [
                *(f"{number:.2f}" for number in numbers),
                "–" if row["budget"] is None else f"{row['budget']:.2f}",
            ]
        lines.append([row["kernel"], str(row["registers"]), *counts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.cu", help="default: all of csrc/cuda")
    parser.add_argument("--json", action="store_true", help="print a JSON list, an object for each kernel")
    arguments = parser.parse_args()
    if missing := [str(file) for file in arguments.files if not file.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    try:
        rows = measure(arguments.files or native_build.cuda_sources())
    except ToolkitError as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.output)
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
