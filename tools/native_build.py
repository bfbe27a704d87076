"""Compiles csrc/ with ninja: the extension for setup.py, the fuzz driver for tests/native/run_sanitizers.sh.

Not torch's BuildExtension: files of different instruction sets need different flags, and importing torch to compile
would cost seconds and fail under build isolation. The stable ABI only takes torch's headers and the path of its
libraries.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_TORCH = (2, 10)
MINIMUM_NVCC = (12, 4)

# -ffp-contract=off: a product and a sum are fused only where the source says so, so the result of a row can't depend
# on what the compiler inlined where.
CXX_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wmissing-declarations",
]
OPTIMISED = ["-O3", "-DNDEBUG"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# By the ending of the file's name.
ISA_FLAGS = {
    "_avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mavx512vbmi2", "-mavx512bf16"),
        *("-mfma", "-mavx2", "-mbmi2"),
        # gcc 12 says it of its own intrinsics; the first one keeps clang from refusing a name that it doesn't know.
        *("-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
    ],
}
PORTABLE_ONLY = "-DUNWEIGHT_PORTABLE_ONLY"
# Only the stable ABI of torch 2.10: what it hides can't be used by mistake.
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000"]


class BuildError(Exception):
    """Something the build needs is missing; the text says what to do."""


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: tuple[int, int]


def site_directories() -> list[Path]:
    """Where packages of this interpreter live, also those that pip's build isolation hides from `import`."""
    names = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    return [Path(name) for name in dict.fromkeys(names) if name and Path(name).is_dir()]


def find_torch() -> Torch | None:
    """The torch that the extension will run with, without importing it."""
    spec = importlib.util.find_spec("torch")
    roots = [Path(spec.origin).parent] if spec and spec.origin else []
    roots += [directory / "torch" for directory in site_directories()]
    for root in roots:
        version_file = root / "version.py"
        if version_file.is_file() and (root / "include" / "torch").is_dir():
            found = re.search(r"^__version__ = '([^']+)'", version_file.read_text(), re.MULTILINE)
            if found:
                return Torch(root, found[1])
    return None


def require_torch() -> Torch:
    torch = find_torch()
    if torch is None:
        raise BuildError(
            "unweight-ext is compiled against torch, and torch isn't installed for this Python: install torch>=2.10 "
            "first, then `pip install --no-build-isolation .` (or let `./run tests` do both)"
        )
    found = tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2])
    if found < MINIMUM_TORCH or not (torch.root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"unweight-ext needs torch 2.10 or newer (its stable ABI), found {torch.version}")
    return torch


def find_cxx() -> list[str]:
    if "CXX" in os.environ:
        command = shlex.split(os.environ["CXX"])
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX={os.environ['CXX']!r}: no such program on the path")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found: install g++ (Debian, Ubuntu: apt-get install g++), or name one in CXX")


def compiles(cxx: list[str], flags: list[str]) -> bool:
    command = [*cxx, *flags, "-Werror", "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True).returncode == 0


def isa_flags(cxx: list[str]) -> dict[str, list[str]]:
    """Flags by file ending, and none at all where the target or the compiler can't take every one of them."""
    target = subprocess.run([*cxx, "-dumpmachine"], capture_output=True, text=True).stdout
    if target.startswith("x86_64") and all(compiles(cxx, flags) for flags in ISA_FLAGS.values()):
        return ISA_FLAGS
    return {}


def find_nvcc() -> Nvcc | None:
    """nvcc from the path, CUDA_HOME or a pip-installed toolkit: the first one that is new enough."""
    places = [shutil.which("nvcc")]
    if "CUDA_HOME" in os.environ:
        places.append(os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc"))
    for directory in site_directories():
        places += sorted(directory.glob("nvidia/cu*/bin/nvcc"), reverse=True)
    for place in places:
        if place and Path(place).is_file():
            text = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            found = re.search(r"release (\d+)\.(\d+)", text)
            if found and (version := (int(found[1]), int(found[2]))) >= MINIMUM_NVCC:
                return Nvcc(Path(place), version)
    return None


def torch_free_sources() -> list[Path]:
    return sorted([*ROOT.glob("csrc/format/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")])


def isa_of(source: Path) -> str:
    return next((ending for ending in ISA_FLAGS if source.stem.endswith(ending)), "")


class Graph:
    """A ninja file in the making: C++ objects, what is linked from them, and checks."""

    def __init__(self, directory: Path, cxx: list[str], flags: list[str], portable: bool = False) -> None:
        try:
            from ninja.ninja_syntax import Writer
        except ImportError:
            raise BuildError("the build needs the package ninja: pip install ninja") from None
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.targets = directory, []
        self.isa = {} if portable else isa_flags(cxx)
        self.flags = [*CXX_FLAGS, *flags, *([] if self.isa else [PORTABLE_ONLY])]
        self.file = open(directory / "build.ninja", "w")
        self.ninja = Writer(self.file, width=1 << 20)
        command = shlex.join(cxx)
        self.ninja.rule("cxx", f"{command} -MMD -MF $out.d $flags -c $in -o $out", "$out", "$out.d", deps="gcc")
        self.ninja.rule("link", f"{command} $in $flags -o $out", "$out")

    def compile(self, sources: list[Path], extra: dict[Path, list[str]] | None = None) -> list[str]:
        """Objects in the order of linking. `extra`: more flags for files in a folder.

        The linker keeps the first copy of an inline function (std::vector and its like) that several objects hold, and
        it must be one that every CPU can run: plain code goes first.
        """
        order = ["", *ISA_FLAGS]
        objects = []
        for source in sorted(sources, key=lambda s: order.index(isa_of(s))):
            isa = isa_of(source)
            if isa and not self.isa:
                continue
            target = str(source.relative_to(ROOT).with_suffix(".o"))
            words = [*self.flags, *(extra or {}).get(source.parent, []), *(self.isa[isa] if isa else [])]
            self.ninja.build(target, "cxx", str(source), variables={"flags": shlex.join(words)})
            objects.append(target)
        return objects

    def link(self, name: str, objects: list[str], flags: list[str]) -> None:
        self.ninja.build(name, "link", objects, variables={"flags": shlex.join(flags)})
        self.targets.append(name)

    def check_cubin(self, nvcc: Nvcc, source: Path) -> None:
        """Compiles `source` for sm_90a and fails on spills and on wgmma repairs (tools/check_cubin.py)."""
        script = ROOT / "tools" / "check_cubin.py"
        command = shlex.join([sys.executable, str(script), "--nvcc", str(nvcc.path)])
        self.ninja.rule("cubin", f"{command} --depfile $out.d $in $out", "$out", "$out.d", deps="gcc")
        target = str(source.relative_to(ROOT).with_suffix(".cubin"))
        self.ninja.build(target, "cubin", str(source), implicit=str(script))
        self.targets.append(target)

    def run(self, quiet: bool = False) -> None:
        """`quiet`: says nothing unless something fails."""
        import ninja

        self.file.close()
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        program = shutil.which("ninja", path=f"{ninja.BIN_DIR}{os.pathsep}{os.environ['PATH']}")
        if program is None:
            raise BuildError("the package ninja is installed without its program: pip install --force-reinstall ninja")
        done = subprocess.run(
            [program, "-C", str(self.directory), *jobs, *self.targets], capture_output=quiet, text=True
        )
        if done.returncode and quiet:
            print(done.stdout, done.stderr, sep="", file=sys.stderr)
        if done.returncode:
            raise BuildError("the C++ build failed; the compiler's own messages are above")


def build_extension(output: Path) -> None:
    """Compiles everything into `output` (…/_C.abi3.so), and as a check, where there is nvcc, decode_check.cu."""
    if sys.platform != "linux":
        raise BuildError(f"unweight-ext builds on Linux; this is {sys.platform}")
    python_include = Path(sysconfig.get_path("include"))
    if not (python_include / "Python.h").is_file():
        raise BuildError(
            f"Python.h isn't in {python_include}: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
        )
    torch, cxx = require_torch(), find_cxx()
    graph = Graph(ROOT / "build" / f"native-{platform.machine()}", cxx, OPTIMISED)
    includes = ["-isystem", str(torch.root / "include"), "-isystem", str(python_include)]
    sources = [*torch_free_sources(), ROOT / "csrc" / "registration.cpp", *ROOT.glob("csrc/torch/*.cpp")]
    torch_flags = [*TORCH_FLAGS, *includes]
    objects = graph.compile(sources, {ROOT / "csrc": torch_flags, ROOT / "csrc" / "torch": torch_flags})
    libraries = ["-Wl,--as-needed", f"-L{torch.root / 'lib'}", "-ltorch_cpu"]
    graph.link(output.name, objects, ["-shared", "-Wl,-O1", *libraries])
    if os.environ.get("UNWEIGHT_CUDA") == "0":
        print("UNWEIGHT_CUDA=0: the CUDA decode headers are not compiled")
    elif nvcc := find_nvcc():
        graph.check_cubin(nvcc, ROOT / "csrc" / "cuda" / "decode_check.cu")
    else:
        print("no nvcc 12.4 or newer on the path, in CUDA_HOME or in site-packages: CUDA decode headers not compiled")
    graph.run()
    output.parent.mkdir(parents=True, exist_ok=True)
    # A new file under the name, never the old one's bytes: another process may have it mapped.
    output.unlink(missing_ok=True)
    shutil.copy2(graph.directory / output.name, output)


def build_fuzz_driver(directory: Path, portable: bool) -> None:
    """The torch-free code and tests/native/*.cpp as a program of its own, under ASan and UBSan."""
    cxx = find_cxx()
    graph = Graph(directory, cxx, SANITIZED, portable)
    sources = [*torch_free_sources(), *sorted(ROOT.glob("tests/native/*.cpp"))]
    graph.link("fuzz_driver", graph.compile(sources), [*SANITIZED, "-pthread"])
    graph.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the fuzz driver with sanitizers into DIRECTORY.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--portable", action="store_true", help="leave the AVX-512 files out")
    arguments = parser.parse_args()
    try:
        build_fuzz_driver(arguments.directory.resolve(), arguments.portable)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
