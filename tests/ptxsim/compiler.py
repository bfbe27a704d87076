"""The project's kernels as PTX modules: compiled once for each content of the sources, parsed once a process."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from .parse import parse_ptx
from .program import Kernel, Module

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "ptx"
CSRC = Path(os.environ.get("UNWEIGHT_CSRC", ROOT / "csrc"))  # tests/mutations names a broken copy

sys.path.insert(0, str(ROOT / "tools"))
import cuda_toolkit  # noqa: E402

_modules: dict[Path, Module] = {}


class CompileError(Exception):
    """nvcc is missing, or refused a source; the text has its messages."""


def compile_ptx(
    source: Path,
    flags: tuple[str, ...] = (),
    headers: Path | None = None,
    architecture: str = cuda_toolkit.HOPPER,
) -> Path:
    """PTX of a .cu file for one architecture, from build/ptx when it was compiled before. `headers`: a folder whose
    headers count, by content, beside those of the source's own folder."""
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        raise CompileError(f"{cuda_toolkit.NVCC_NOT_FOUND}: {cuda_toolkit.INSTALL_HINT}")
    command = [*cuda_toolkit.ptx_flags(architecture), *flags]
    content = hashlib.sha256(repr((nvcc.version, command)).encode())
    folders = [source.parent, headers] if headers else [source.parent]
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in (".h", ".cuh")}
    for file in [source, *sorted(files)]:
        content.update(file.read_bytes() + b"\0")
    target = CACHE / f"{source.stem}-{content.hexdigest()[:20]}.ptx"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}.part")
            done = subprocess.run([nvcc.path, *command, source, "-o", part], capture_output=True, text=True)
            if done.returncode:
                raise CompileError(f"nvcc {source.name}: {done.stderr}{done.stdout}")
            part.rename(target)
    return target


def load_module(
    source: Path,
    flags: tuple[str, ...] = (),
    headers: Path | None = None,
    architecture: str = cuda_toolkit.HOPPER,
) -> Module:
    """The parsed PTX of a .cu file."""
    path = compile_ptx(source, flags, headers, architecture)
    if path not in _modules:
        _modules[path] = parse_ptx(path.read_text(), when_asked=True)
    return _modules[path]


@functools.cache
def find_kernel(name: str, csrc: Path = CSRC, architecture: str = cuda_toolkit.HOPPER) -> Kernel:
    """A kernel of csrc/cuda/ by its name; the sources are looked at once a process. Raises CompileError when there
    is none."""
    sources = sorted((csrc / "cuda").rglob("*.cu"))
    # Files that spell the name first: the others may make it by a macro.
    for source in sorted(sources, key=lambda file: re.search(rf"\b{name}\b", file.read_text()) is None):
        if architecture not in cuda_toolkit.architectures(source):
            continue
        module = load_module(source, headers=csrc, architecture=architecture)
        if name in module.kernels:
            return module.kernels[name]
    raise CompileError(f"no kernel {name} for {architecture} in {', '.join(source.name for source in sources)}")
