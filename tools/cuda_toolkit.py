"""The CUDA compiler: where it is, and with which flags it compiles for which GPUs. No GPU is asked for anything."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MINIMUM_NVCC = (12, 4)
# The packages that hold an nvcc with all that it needs (`./run tests` installs them where there is none).
PIP_PACKAGES = tuple(f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime"))
INSTALL_HINT = f"install a CUDA toolkit, or `pip install {' '.join(PIP_PACKAGES)}`"
NVCC_NOT_FOUND = "no nvcc 12.4 or newer on the path, in CUDA_HOME or in site-packages"

COMPILE_FLAGS = ["-O3", "-std=c++17", "-lineinfo"]
# GPUs that kernels are compiled for by name. sm_90a, Hopper, has tensor core instructions that no other GPU has; code
# for sm_80 runs on all of compute capability 8.
HOPPER, AMPERE = "sm_90a", "sm_80"
# And as PTX, which the driver compiles for GPUs that came later.
LATER = "compute_90"
HOPPER_ALONE = "linear"  # the folder of csrc/cuda with the fused product


def architectures(source: Path) -> list[str]:
    """What a .cu file is compiled for: "sm_…" is code, "compute_…" PTX."""
    return [HOPPER] if source.parent.name == HOPPER_ALONE else [HOPPER, AMPERE, LATER]


def gencode(architecture: str) -> str:
    """nvcc's flag for code or PTX of one architecture."""
    return f"-gencode=arch={architecture.replace('sm_', 'compute_')},code={architecture}"


def ptx_flags(architecture: str = HOPPER) -> list[str]:
    """For the PTX that code of this architecture is made of."""
    return ["-ptx", *COMPILE_FLAGS, gencode(architecture.replace("sm_", "compute_"))]


class ToolkitError(Exception):
    """A toolkit that can't be used; the text says what to do."""


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: tuple[int, int]

    def _dry_run(self) -> dict[str, str]:
        """What nvcc knows of its own installation."""
        done = subprocess.run([self.path, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True)
        return dict(re.findall(r"^#\$ (\w+)=(.*)$", done.stderr, re.MULTILINE))

    def host_files(self) -> tuple[list[Path], Path]:
        """Folders of headers for the host compiler, and libcudart_static.a. Raises ToolkitError."""
        known = self._dry_run()
        top = Path(known["TOP"]) if "TOP" in known else self.path.parent.parent
        headers = [Path(f.removeprefix("-I")) for f in shlex.split(known.get("INCLUDES", ""))]
        folders = [Path(f.removeprefix("-L")) for f in shlex.split(known.get("LIBRARIES", ""))]
        libraries = [f / "libcudart_static.a" for f in [*folders, top / "lib", top / "lib64"]]
        library = next((f for f in libraries if f.is_file()), None)
        if library is None or not any((f / "cuda_runtime_api.h").is_file() for f in headers):
            missing = "the CUDA runtime (cuda_runtime_api.h, libcudart_static.a)"
            raise ToolkitError(f"{self.path} is there without {missing}: {INSTALL_HINT}")
        return [f for f in headers if f.is_dir()], library


def site_directories() -> list[Path]:
    """Where packages of this interpreter live, also those that pip's build isolation hides from `import`."""
    names = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    return [Path(name) for name in dict.fromkeys(names) if name and Path(name).is_dir()]


def find_program(name: str) -> Path | None:
    """A program of the toolkit from pip's packages (`nvdisasm`, `cuobjdump`), else from the path."""
    for directory in site_directories():
        for place in sorted(directory.glob(f"nvidia/cu*/bin/{name}"), reverse=True):
            return place
    found = shutil.which(name)
    return Path(found) if found else None


def find_nvcc() -> Nvcc | None:
    """nvcc from the path, CUDA_HOME or a pip-installed toolkit: the first one that is new enough."""
    places = [shutil.which("nvcc")]
    if "CUDA_HOME" in os.environ:
        places.append(os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc"))
    for directory in site_directories():
        places += sorted(str(place) for place in directory.glob("nvidia/cu*/bin/nvcc"))[::-1]
    for place in places:
        if place and Path(place).is_file():
            text = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            found = re.search(r"release (\d+)\.(\d+)", text)
            if found and (version := (int(found[1]), int(found[2]))) >= MINIMUM_NVCC:
                return Nvcc(Path(place), version)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Says which nvcc the build takes.")
    parser.add_argument("--missing", action="store_true", help="pip's packages that are needed instead: none with one")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if arguments.missing:
        print(*([] if nvcc else PIP_PACKAGES))
    else:
        print(f"{nvcc.path} {nvcc.version[0]}.{nvcc.version[1]}" if nvcc else NVCC_NOT_FOUND)


if __name__ == "__main__":
    main()
