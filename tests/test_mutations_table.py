"""tests/mutations: each mutation finds its place. (Whether it is noticed takes an hour: `python tests/mutations`.)"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("mutations_table", ROOT / "tests" / "mutations" / "table.py")
table = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = table
_spec.loader.exec_module(table)


@pytest.mark.parametrize("mutation", table.MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_broken_stands_there_once(mutation: table.Mutation) -> None:
    assert (ROOT / "csrc" / "cuda" / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
