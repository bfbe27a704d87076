"""`native`: csrc/'s torch-free code as a Python module (tests/_native), built when a test first asks for it.

    from native_module import native

ninja compiles what changed since the last run, so a second import takes a moment.
"""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import native_build
from native_build import ROOT

FLAGS = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
# pybind11's templates take three times as long with it, and are not what is tested.
BINDING_FLAGS = ["-fno-sanitize=undefined"]


def build() -> Path:
    """The module's file, up to date. Raises BuildError, after the compiler's own messages."""
    import pybind11

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    directory = ROOT / "build" / f"tests{suffix.removesuffix('.so')}"
    directory.mkdir(parents=True, exist_ok=True)
    # Processes of pytest-xdist start together: one builds, the others find it done.
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        graph = native_build.Graph(directory, native_build.find_cxx(), FLAGS)
        include = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include")]
        sources = [
            *ROOT.glob("csrc/format/*.cpp"),
            *native_build.cuda_host_sources(),
            *ROOT.glob("tests/_native/*.cpp"),
        ]
        objects = graph.compile(sources, {ROOT / "tests" / "_native": [*BINDING_FLAGS, *include]})
        name = f"_native{suffix}"
        graph.link(name, objects, ["-shared", *FLAGS])
        graph.run(quiet=True)
    return directory / name


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_native", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = load()
