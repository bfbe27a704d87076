"""Packed bytes that an earlier build wrote still decode: version 1 of the format stays readable.

`python tests/test_golden.py FILE` writes such a file with this build's bytes; tests/golden/ keeps one of each version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import LAYOUTS, bits

import unweight_ext as u
from unweight_ext import reference

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_bytes_of_earlier_builds_decode(file: Path, layout: str) -> None:
    tensors = np.load(file)
    packed, weight = tensors[layout], tensors["weight"]
    assert u.info(torch.from_numpy(packed)).layout == layout
    assert (u.unpack(torch.from_numpy(packed)).view(torch.int16).numpy().view(np.uint16) == weight).all()
    assert (reference.unpack(packed) == weight).all()


def test_there_are_such_bytes() -> None:
    assert [file.stem for file in FILES] == ["version-1"]


def write(file: str) -> None:
    """Two segments, patches, a row of zeros, padding."""
    original = bits("few outsiders", 7, 2100)
    original[3] = 0
    tensor = torch.from_numpy(original.view(np.int16)).view(torch.bfloat16)
    np.savez_compressed(file, weight=original, **{name: u.pack(tensor, layout=name).numpy() for name in LAYOUTS})


if __name__ == "__main__":
    write(*sys.argv[1:])
