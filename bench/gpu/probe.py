"""Whether this machine has what the run is for, asked in a process of its own: this one never loads CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

MINIMUM_TORCH = (2, 10)
HOPPER = (9, 0)

_QUESTION = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if found["available"]:
    found["name"] = torch.cuda.get_device_name(0)
    found["capability"] = torch.cuda.get_device_capability(0)
print(json.dumps(found))
"""


def ask() -> dict:
    """What torch says of this machine, or {"error": …}."""
    try:
        done = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"error": "torch didn't answer within 120 s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def obstacle(found: dict) -> str:
    """One line that says why nothing can be run here, or nothing."""
    if "error" in found:
        return f"torch doesn't answer in {sys.executable}: {found['error']}"
    version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        return f"torch {found['torch']} is older than 2.10"
    if not found["available"]:
        build = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
        return f"no GPU here that torch {found['torch']} ({build}) can use"
    if tuple(found["capability"]) != HOPPER:
        major, minor = found["capability"]
        return f"{found['name']} has compute capability {major}.{minor}, the kernels need Hopper's 9.0"
    return ""
