"""Runs a test with one of the CPU instruction sets."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from unweight_ext import ops

CAPABILITIES = ("portable", "avx512")
_BEST = ops.cpu_capability()


@contextmanager
def capability(name: str) -> Iterator[None]:
    """Only within: the CPU code of this instruction set. Skips the test where the CPU hasn't it."""
    level = CAPABILITIES.index(name)
    if level > _BEST:
        pytest.skip(f"this CPU has no {name}, or UNWEIGHT_CPU forbids it")
    assert ops.cpu_capability(level) == level
    try:
        yield
    finally:
        ops.cpu_capability(_BEST)
