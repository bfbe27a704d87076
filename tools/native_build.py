"""Compiles csrc/ with ninja: the extension for setup.py, the fuzz driver for tests/native/run_sanitizers.sh.

Not torch's BuildExtension: files of different instruction sets need different flags, and importing torch to compile
would cost seconds and fail under build isolation. The stable ABI only takes torch's headers and the path of its
libraries.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cuda_toolkit import (
    COMPILE_FLAGS,
    INSTALL_HINT,
    NVCC_NOT_FOUND,
    Nvcc,
    ToolkitError,
    architectures,
    find_nvcc,
    gencode,
    site_directories,
)

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_TORCH = (2, 10)

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


def torch_free_sources() -> list[Path]:
    return sorted([*ROOT.glob("csrc/format/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")])


def cuda_host_sources() -> list[Path]:
    """What plans and drives the kernels: free of torch and of CUDA."""
    return sorted(ROOT.glob("csrc/cuda/**/*.cpp"))


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
        for source in sorted(sources, key=lambda s: (order.index(isa_of(s)), s)):
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

    def compile_cuda(self, nvcc: Nvcc, cxx: list[str], sources: list[Path]) -> list[str]:
        """Objects with code for each file's GPUs, and host code that hides its symbols as the C++ objects do."""
        host = ["-Xcompiler=-fPIC,-fvisibility=hidden", *(["-ccbin", cxx[0]] if len(cxx) == 1 else [])]
        # Lines for profilers make code several times as large; compressed they hardly count.
        command = shlex.join([str(nvcc.path), *COMPILE_FLAGS, "-Xfatbin=-compress-all", *host])
        self.ninja.rule("nvcc", f"{command} $flags -MD -MF $out.d -c $in -o $out", "NVCC $out", "$out.d", deps="gcc")
        objects = [str(source.relative_to(ROOT).with_suffix(".cu.o")) for source in sources]
        for source, target in zip(sources, objects, strict=True):
            flags = shlex.join(gencode(architecture) for architecture in architectures(source))
            self.ninja.build(target, "nvcc", str(source), variables={"flags": flags})
        return objects

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


def usable_nvcc() -> Nvcc | None:
    """nvcc, as far as UNWEIGHT_CUDA wants it: 0 builds without CUDA, 1 not without, else where there is an nvcc."""
    wanted = os.environ.get("UNWEIGHT_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"UNWEIGHT_CUDA={wanted!r}: expected 0 (build without CUDA), 1 (fail without it) or nothing")
    if wanted == "0":
        print("UNWEIGHT_CUDA=0: building without CUDA kernels")
        return None
    nvcc = find_nvcc()
    if nvcc is None and wanted == "1":
        raise BuildError(f"UNWEIGHT_CUDA=1, but there is {NVCC_NOT_FOUND}: {INSTALL_HINT}")
    if nvcc is None:
        print(f"{NVCC_NOT_FOUND}: building without CUDA kernels")
    return nvcc


def cuda_sources() -> list[Path]:
    return sorted(ROOT.glob("csrc/cuda/**/*.cu"))


def kernel_names(source: Path) -> list[str]:
    """The kernels that a .cu file defines."""
    written = r'^(?:extern "C" __global__[^;{]*?\b|UNWEIGHT_\w+_KERNEL\()(unweight_\w+)[(,]'  # out, or by a macro
    return re.findall(written, source.read_text(), re.MULTILINE)


def write_kernel_list(directory: Path) -> None:
    """cuda_kernels.inc, which csrc/torch/cuda_kernels.h includes."""
    names = [name for source in cuda_sources() for name in kernel_names(source)]
    text = "".join(f"UNWEIGHT_KERNEL({name})\n" for name in names)
    file = directory / "cuda_kernels.inc"
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


def build_extension(output: Path, gpu: Path | None = None) -> None:
    """Compiles everything into `output` (…/_C.abi3.so); the CUDA kernels where there is nvcc (see `usable_nvcc`).

    `gpu`: a file of the tests that stands for the GPU instead, in place of what knows the CUDA runtime.
    """
    if sys.platform != "linux":
        raise BuildError(f"unweight-ext builds on Linux; this is {sys.platform}")
    python_include = Path(sysconfig.get_path("include"))
    if not (python_include / "Python.h").is_file():
        raise BuildError(
            f"Python.h isn't in {python_include}: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
        )
    directory = ROOT / "build" / f"native-{platform.machine()}"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:  # tests build here too
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_extension(directory, python_include, output, gpu)


def _build_extension(directory: Path, python_include: Path, output: Path, gpu: Path | None) -> None:
    torch, cxx, nvcc = require_torch(), find_cxx(), usable_nvcc()
    graph = Graph(directory, cxx, OPTIMISED)
    headers = [torch.root / "include", python_include]
    libraries = ["-Wl,--as-needed", f"-L{torch.root / 'lib'}", "-ltorch_cpu"]
    sources = {*torch_free_sources(), *ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/torch/*.cpp"), *cuda_host_sources()}
    cuda_objects = []
    if nvcc:
        try:
            cuda_headers, cudart = nvcc.host_files()
        except ToolkitError as error:
            raise BuildError(f"{error}; UNWEIGHT_CUDA=0 builds without CUDA") from None
        headers += cuda_headers
        # Linked in, so that the library loads where there is no CUDA, and under a torch of another CUDA.
        libraries += [str(cudart), "-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lrt"]
        write_kernel_list(graph.directory)
        cuda_objects = graph.compile_cuda(nvcc, cxx, cuda_sources())
    glue = ROOT / "csrc" / "torch"
    sources.remove(glue / ("cuda_absent.cpp" if nvcc else "cuda_device.cpp"))
    if gpu:
        sources -= {glue / f"cuda_{name}.cpp" for name in ("absent", "device", "place")}
        sources.add(gpu)
        cuda_objects = []
    # The list of kernels isn't a system's header: who includes it is compiled again when it changes.
    torch_flags = [
        *TORCH_FLAGS,
        f"-I{graph.directory}",
        *(word for header in headers for word in ("-isystem", str(header))),
    ]
    folders = [ROOT / "csrc", glue, *([gpu.parent] if gpu else [])]
    objects = graph.compile(list(sources), dict.fromkeys(folders, torch_flags))
    graph.link(output.name, [*objects, *cuda_objects], ["-shared", "-Wl,-O1", *libraries])
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
