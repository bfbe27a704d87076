"""Checks and times every kernel on a Hopper GPU, and writes results.json, report.md, rates.png and log.txt into OUT.

    python -m bench.gpu OUT        (in the repository; builds in place with the Python and the torch that run this)

A call takes 8 minutes at most. What it didn't get to, and what failed, the next call with the same OUT runs. Ends with
0 when nothing failed, 1 when something did, 2 for wrong arguments, 3 where there is no such GPU (then nothing was run).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from .probe import ask, obstacle
from .record import FAILED, ROOT, Record, hash_sources

SECONDS = 480.0
FOR_THE_REPORT = 15.0
NO_GPU = 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder; it is made")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for the whole call, report included (default {SECONDS:g})"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this program; its figures mean nothing"
    )
    parser.add_argument("--steps", default="bench.gpu.steps", metavar="MODULE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds <= FOR_THE_REPORT:
        parser.error(f"--seconds {options.seconds:g}: expected more than {FOR_THE_REPORT:g}, which the report may take")
    return options


def write_report(record: Record, steps: object, folder: Path) -> list[str]:
    """Writes report.md and rates.png. Returns the lines about what was not run."""
    from .picture import draw
    from .report import Report

    report = Report(record, steps)
    text = report.markdown(draw(report, folder))
    scratch = folder / "report.md.partial"
    scratch.write_text(text)
    os.replace(scratch, folder / "report.md")
    return [*(f"not run: {line}" for line in report.not_run()), f"units: {report.counts()}"]


def main(arguments: list[str] | None = None) -> int:
    start = time.monotonic()
    options = parse(arguments)
    if options.device == "cuda" and (why := obstacle(ask())):
        print(f"nothing run: {why}", file=sys.stderr)
        return NO_GPU
    from .runner import Runner

    sys.path[:0] = [str(ROOT)]
    record = Record(options.out, options.device, hash_sources())
    if record.dropped:
        print(f"everything is run again: {record.dropped}")
    seconds = options.seconds - FOR_THE_REPORT - (time.monotonic() - start)
    runner = Runner(options.steps, options.device, record, options.out / "log.txt", seconds, _say)
    try:
        runner.run()
    finally:
        for line in write_report(record, runner.steps, options.out):
            print(line)
    print(f"{options.out}: report.md, results.json; {time.monotonic() - start:.0f} s")
    return 1 if record.with_status(FAILED) else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
