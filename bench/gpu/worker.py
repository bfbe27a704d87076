"""The process that runs a step's units: one unit's name a line in, one JSON line out.

A kernel that hangs can only be stopped with its process, and one that faults leaves a CUDA context that is of no more
use. So units run here, and this process ends after the first failure; runner.py starts another for the rest.

    python -m bench.gpu.worker MODULE STEP DEVICE      (MODULE has the steps in STEPS)
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module

from .record import FAILED, NOT_RUN, OK
from .step import NotRun


def main() -> None:
    module, name, device = sys.argv[1:]
    # What the units and the programs they start print goes to the log, only outcomes to the runner.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    step = next(step for step in import_module(module).STEPS if step.name == name)
    for line in sys.stdin:
        start = time.perf_counter()
        outcome: dict = {"status": OK}
        try:
            outcome["figures"] = step.run(line.strip(), device)
        except NotRun as reason:
            outcome = {"status": NOT_RUN, "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            outcome = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
        outcome["seconds"] = round(time.perf_counter() - start, 3)
        replies.write(json.dumps(outcome) + "\n")
        if outcome["status"] == FAILED:
            break
    # Not through the interpreter's end: CUDA's own clean-up can hang after a fault.
    replies.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
