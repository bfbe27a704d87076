"""Builds unweight_ext/_C.abi3.so. What and how: tools/native_build.py; everything else: pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import native_build


class NinjaBuild(build_ext):
    """Hands the one extension to ninja; setuptools keeps the names, places and copies."""

    def build_extension(self, ext: Extension) -> None:
        try:
            native_build.build_extension(Path(self.get_ext_fullpath(ext.name)).resolve())
        except native_build.BuildError as error:
            sys.exit(f"error: {error}")


setup(
    ext_modules=[Extension("unweight_ext._C", sources=["csrc/registration.cpp"], py_limited_api=True)],
    cmdclass={"build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
