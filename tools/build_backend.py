"""setuptools' build backend, which asks for a torch of its own only where there is none to compile against.

With torch under `build-system.requires`, every isolated build would download gigabytes beside the torch that is
installed already.
"""

from __future__ import annotations

from native_build import find_torch
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _torch() -> list[str]:
    return [] if find_torch() else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]
