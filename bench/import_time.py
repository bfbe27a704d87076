"""What `import unweight_ext` adds to `import torch`: medians over fresh processes.

python bench/import_time.py [--json] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from machine import machine

CODE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import unweight_ext
print(middle - start, time.perf_counter() - middle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="counted runs, after one that isn't (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs + 1):
        done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
        runs.append([float(x) for x in done.stdout.split()])
    torch_s, ours_s = (statistics.median(r[i] for r in runs[1:]) for i in range(2))
    if options.json:
        print(json.dumps({"machine": machine(), "torch_s": torch_s, "unweight_ext_s": ours_s}))
    else:
        print(machine())
        print(f"import torch {torch_s:.2f} s, import unweight_ext after it {ours_s:.3f} s (bar: less than 0.2)")


if __name__ == "__main__":
    main()
