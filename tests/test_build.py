"""The build: what the compiled part may contain, what the tools say when something is missing, wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import cuda_toolkit
import native_build

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def library() -> Path:
    import unweight_ext._C

    return Path(unweight_ext._C.__file__)


def output_of(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def symbols(file: Path, *options: str) -> dict[str, str]:
    """name -> type, as nm has them."""
    lines = output_of("nm", "-P", *options, file).splitlines()
    return {line.split()[0].split("@")[0]: line.split()[1] for line in lines if len(line.split()) > 1}


def plain(mangled: str) -> str:
    return output_of("c++filt", mangled).strip()


def test_library_uses_only_the_stable_abi(library: Path) -> None:
    names = symbols(library, "-D", "-u")
    unstable = [plain(n) for n in names if re.match(r"_ZNK?(2at|3c10|5torch)|cu[A-Z]|cuda[A-Z]", n)]
    assert not unstable
    assert any(n.startswith("aoti_torch_") for n in names)


def test_library_uses_no_function_newer_than_torch_2_10(library: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    source = "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n#include <torch/csrc/stable/c/shim.h>\n"
    command = [*native_build.find_cxx(), "-std=c++17", *native_build.TORCH_FLAGS, "-I", include, "-E", "-x", "c++", "-"]
    done = subprocess.run([str(c) for c in command], input=source, check=True, capture_output=True, text=True)
    declared = set(re.findall(r"\b(?:aoti_torch|torch)_\w+(?=\s*\()", done.stdout))
    used = {n for n in symbols(library, "-D", "-u") if n.startswith(("aoti_torch_", "torch_"))}
    assert used and used <= declared


def test_library_exports_its_entry_point_alone(library: Path) -> None:
    ours = [n for n, kind in symbols(library, "-D", "--defined-only").items() if kind == "T"]
    assert ours == ["PyInit__C"]


def test_library_needs_no_cuda(library: Path) -> None:
    needed = re.findall(r"NEEDED.*\[(.+)\]", output_of("readelf", "-d", library))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "cuda" in name or "cudart" in name or "nvidia" in name]


def test_library_has_code_for_all_gpus(library: Path) -> None:
    """Each file's kernels for Hopper and, but for the fused product, for compute capability 8 and as PTX."""
    cuobjdump = cuda_toolkit.find_program("cuobjdump")
    assert cuobjdump is not None, "no cuobjdump: pip install nvidia-cuda-cuobjdump"
    sources = native_build.cuda_sources()
    everywhere = [source for source in sources if cuda_toolkit.AMPERE in cuda_toolkit.architectures(source)]
    cubins = re.findall(r"\.(sm_\w+)\.cubin", output_of(cuobjdump, "--list-elf", library))
    assert Counter(cubins) == {"sm_90a": len(sources), "sm_80": len(everywhere)}
    ptx = re.findall(r"\.(sm_\w+)\.ptx", output_of(cuobjdump, "--list-ptx", library))
    assert Counter(ptx) == {"sm_90": len(everywhere)}


@pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="only x86-64 has AVX files")
def test_avx512_files_share_no_function_with_others() -> None:
    """Weak symbols of such a file could be the ones that the linker keeps for every machine."""
    objects = sorted((ROOT / "build").glob("native*/csrc/cpu/*_avx512.o"))
    if not objects:
        pytest.skip("no AVX-512 objects: another processor, or built elsewhere")
    for object_file in objects:
        symbols = subprocess.run(["nm", object_file], check=True, capture_output=True, text=True).stdout
        assert not re.search(r"^\S* [WVu] ", symbols, re.MULTILINE), object_file


@pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="only x86-64 has AVX files")
def test_every_cpu_can_run_the_functions_that_files_share(tmp_path: Path) -> None:
    """An inline function of the standard library that both an AVX-512 file and a plain one hold must be linked from
    the plain one: else the portable path dies of an illegal instruction on an older CPU."""
    shared = "__attribute__((noipa)) inline void grow(float* p) { for (int i = 0; i < 999; i++) p[i] *= 2; }\n"
    sources = {"plain": shared + "void f(float* p) { grow(p); }", "a_avx512": shared + "void g(float* p) { grow(p); }"}
    cxx = native_build.find_cxx()
    if not native_build.isa_flags(cxx):
        pytest.skip(f"{cxx[0]} takes no AVX-512-BF16 flags: the build has no AVX files")
    graph = native_build.Graph(tmp_path, cxx, ["-O3"])
    # Relative to the repository, as the build's own sources are.
    folder = ROOT / "build" / f"link-order-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        for name, text in sources.items():
            (folder / f"{name}.cpp").write_text(text)
        graph.link("shared.so", graph.compile(sorted(folder.glob("*.cpp"))), ["-shared"])
        graph.run()
    finally:
        shutil.rmtree(folder)
    wide = re.compile("%[yz]mm")
    (avx512,) = tmp_path.rglob("a_avx512.o")
    assert wide.search(output_of("objdump", "-d", avx512)), "the test's AVX-512 file uses no AVX"
    assert not wide.search(output_of("objdump", "-d", tmp_path / "shared.so"))


def test_portable_build_leaves_no_function_undefined(tmp_path: Path) -> None:
    """What csrc/cpu/avx512_absent.cpp stands in for, with the same arguments: a shared library links without it, and
    then doesn't load where there are no AVX-512 files."""
    graph = native_build.Graph(tmp_path, native_build.find_cxx(), ["-O0"], portable=True)
    graph.link("portable.so", graph.compile(native_build.torch_free_sources()), ["-shared", "-Wl,-z,defs"])
    graph.run()  # raises BuildError


@pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="only x86-64 has AVX files")
@pytest.mark.parametrize("cxx", ["g++", "clang++"])
def test_compilers_take_the_avx512_flags(cxx: str) -> None:
    if shutil.which(cxx) is None or not native_build.compiles([cxx], ["-mavx512bf16"]):
        pytest.skip(f"no {cxx} on the path, or it is too old for AVX-512-BF16")
    assert native_build.isa_flags([cxx]) == native_build.ISA_FLAGS


def run_without(hidden: set[str], command: list[str], tmp_path: Path, **environment: str):
    """Runs a command with a path that has every program but the hidden ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in ("/bin", "/usr/bin", str(Path(sys.executable).parent)):
        for program in Path(directory).iterdir():
            link = folder / program.name
            if program.name not in hidden and not link.is_symlink():
                link.symlink_to(program)
    keep = {k: v for k, v in os.environ.items() if k not in ("CXX", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX")}
    env = {**keep, "PATH": str(folder), **environment}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)


COMPILERS = {name for name in os.listdir("/usr/bin") if re.search(r"(^|-)(g\+\+|c\+\+|clang\+\+)(-[\d.]+)?$", name)}


def test_run_names_the_package_when_the_compiler_is_missing(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    done = run_without(COMPILERS, ["bash", "run", "tests"], tmp_path, VIRTUAL_ENV=str(environment))
    assert done.returncode != 0
    assert re.search(r"^error: no C\+\+ compiler \(g\+\+\): .*g(cc-c)?\+\+", done.stderr, re.MULTILINE), done.stderr
    assert "downloading" not in done.stderr


def test_build_names_the_package_when_the_compiler_is_missing(tmp_path: Path) -> None:
    done = run_without(COMPILERS, [sys.executable, str(TOOLS / "native_build.py"), str(tmp_path / "x")], tmp_path)
    assert done.returncode != 0 and "install g++" in done.stderr


def test_run_refuses_a_python_that_is_too_old_or_none(tmp_path: Path) -> None:
    done = run_without(set(), ["bash", "run", "tests"], tmp_path, VIRTUAL_ENV=str(tmp_path / "no environment"))
    assert done.returncode != 0 and "has no Python 3.10 or newer" in done.stderr


def test_run_without_a_command_explains_itself() -> None:
    assert "./run demo [PATH]" in output_of("bash", ROOT / "run")
    wrong = subprocess.run(["bash", ROOT / "run", "tset"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "unknown command: tset" in wrong.stderr


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    output_of(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def test_build_without_torch_says_what_to_do(python_without_torch: Path) -> None:
    code = "import native_build as b\ntry: b.require_torch()\nexcept b.BuildError as e: print(e)"
    done = subprocess.run([python_without_torch, "-c", code], cwd=TOOLS, capture_output=True, text=True)
    assert "install torch>=2.10 first" in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr


def test_isolated_build_finds_the_torch_it_will_run_with(tmp_path: Path) -> None:
    # What pip's build isolation does to `import`.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if 'packages' not in p]\n"
    )
    code = "import importlib.util, native_build as b\nprint(importlib.util.find_spec('torch'), b.find_torch().version)"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{TOOLS}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"None {torch.__version__}\n", done.stdout + done.stderr


def test_build_asks_for_torch_only_where_there_is_none(python_without_torch: Path) -> None:
    code = "from native_build import find_torch; print(find_torch())"
    assert subprocess.run([python_without_torch, "-c", code], cwd=TOOLS, capture_output=True, text=True).stdout == (
        "None\n"
    )
    here = subprocess.run(
        [sys.executable, "-c", "import build_backend as b; print(b._torch())"],
        cwd=TOOLS,
        capture_output=True,
        text=True,
    )
    assert here.stdout == "[]\n", here.stderr


@pytest.fixture
def fake_nvcc(tmp_path: Path) -> Callable[[str, str], Path]:
    """fake_nvcc(folder, release): a program that only knows its version."""

    def make(folder: str, release: str) -> Path:
        program = tmp_path / folder / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        program.chmod(0o755)
        return program

    return make


def test_nvcc_is_found_in_three_places(fake_nvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, home = fake_nvcc("path", "12.3"), fake_nvcc("home/bin", "12.4")
    fake_nvcc("site/nvidia/cu12/bin", "12.9")
    newest = fake_nvcc("site/nvidia/cu13/bin", "13.0")
    monkeypatch.setattr(cuda_toolkit, "site_directories", lambda: [tmp_path / "site"])
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert cuda_toolkit.find_nvcc() == cuda_toolkit.Nvcc(newest, (13, 0))
    monkeypatch.setenv("CUDA_HOME", str(home.parent.parent))
    assert cuda_toolkit.find_nvcc() == cuda_toolkit.Nvcc(home, (12, 4))


@pytest.mark.parametrize(
    "wanted, message",
    [("1", "^UNWEIGHT_CUDA=1, but there is no nvcc 12.4 or newer .*nvidia-nvvm"), ("yes", "^UNWEIGHT_CUDA='yes'")],
)
def test_a_build_that_wants_cuda_fails_without(wanted: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNWEIGHT_CUDA", wanted)
    monkeypatch.setattr(native_build, "find_nvcc", lambda: None)
    with pytest.raises(native_build.BuildError, match=message):
        native_build.usable_nvcc()


def test_a_compiler_without_its_runtime_is_named(fake_nvcc) -> None:
    nvcc = cuda_toolkit.Nvcc(fake_nvcc("alone/bin", "13.0"), (13, 0))
    with pytest.raises(
        cuda_toolkit.ToolkitError, match="alone/bin/nvcc is there without the CUDA runtime .*pip install"
    ):
        nvcc.host_files()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [True, False], ids=["isolated", "not isolated"])
def test_pip_install_gives_an_abi3_wheel_that_works_elsewhere(isolation: bool, tmp_path: Path) -> None:
    options = [] if isolation else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "-w", tmp_path, "."]
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"unweight_ext-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "unweight_ext/_C.abi3.so" in names
    assert not [n for n in names if not n.startswith("unweight_ext")]

    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = "import unweight_ext, torch; print(unweight_ext.__file__, torch.ops.unweight._cpu_capability(-1))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(f"{site}/unweight_ext/__init__.py"), found.stdout + found.stderr
    assert "unweight_ext_command.py" in names
