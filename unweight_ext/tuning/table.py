"""Tables of what was measured to be fastest on a GPU: their files, and how the operators get to know them.

A table counts from `load` on, for all GPUs of its name in this process, and nothing is loaded by itself: what a product
runs never depends on a file that nobody asked for. Results of up to 64 rows are the same with every table.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .choices import BUCKETS
from .costs import TILED

VERSION = 1


@dataclass(frozen=True)
class Entry:
    """What was fastest for a weight and up to so many rows of x."""

    layout: str
    out_features: int
    in_features: int
    tokens: int  # a bucket: from above the one before up to this
    config: int  # tokens of the instance; 0: decoded to scratch
    microseconds: float  # with it
    default_microseconds: float  # with what runs without a table


@dataclass(frozen=True)
class Table:
    """Of GPUs of a name, as torch.cuda.get_device_name gives it."""

    gpu: str
    entries: tuple[Entry, ...]
    about: str = ""  # when and with what it was measured


def default_path(gpu: str) -> Path:
    """In the user's cache folder: $XDG_CACHE_HOME/unweight_ext, or ~/.cache/unweight_ext."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "unweight_ext" / f"tuned-{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-')}.json"


def save(table: Table, path: Path) -> None:
    """Writes the file at once or not at all. Makes its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": VERSION, **asdict(table)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as scratch:
        try:
            json.dump(content, scratch, indent=1)
            scratch.write("\n")
            scratch.flush()
            os.fsync(scratch.fileno())
            os.replace(scratch.name, path)
        except BaseException:
            Path(scratch.name).unlink(missing_ok=True)
            raise


def read(path: Path) -> Table:
    """The table of a file. Raises OSError, and ValueError for what isn't one."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a table of `unweight tune`: {error}") from None
    try:
        return _table_of(content)
    except (KeyError, TypeError, ValueError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a table of `unweight tune`: {what}") from None


def _table_of(content: Any) -> Table:
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__}, expected an object")
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']!r}, expected {VERSION}")
    if not isinstance(content["gpu"], str) or not content["gpu"]:
        raise ValueError(f"gpu: {content['gpu']!r}, expected a name")
    return Table(content["gpu"], tuple(map(_entry_of, content["entries"])), str(content.get("about", "")))


def _entry_of(values: Any) -> Entry:
    if not isinstance(values, dict):
        raise ValueError(f"an entry is {values!r}, expected an object")
    entry = Entry(**{f.name: values[f.name] for f in fields(Entry)})
    if entry.layout not in TILED:
        raise ValueError(f"layout: {entry.layout!r}, expected one of {', '.join(TILED)}")
    if entry.tokens not in BUCKETS:
        raise ValueError(f"tokens: {entry.tokens!r}, expected a power of two from {BUCKETS[0]} to {BUCKETS[-1]}")
    for name in ("out_features", "in_features", "config"):
        if type(value := getattr(entry, name)) is not int or value < 0:
            raise ValueError(f"{name}: {value!r}, expected a whole number")
    return entry


def apply(table: Table) -> None:
    """Makes the operators of this process follow it. Raises RuntimeError for entries that can't be."""
    import torch

    from .. import ops

    numbers: list[int] = []
    for e in table.entries:
        numbers += [ops.LAYOUTS.index(e.layout), e.out_features, e.in_features, e.tokens, e.config]
    torch.ops.unweight._set_tuned(table.gpu, numbers)


def load_tuned(path: str | os.PathLike[str] | None = None) -> Table:
    """Makes the operators of this process choose by a table of `unweight tune`. Returns it.

    `path`: its file; by default the one that `unweight tune` wrote for the current GPU. What a product of up to 64 rows
    gives stays the same, bit for bit. Raises OSError, ValueError (not such a table), RuntimeError (no GPU).
    """
    if path is None:
        import torch

        path = default_path(torch.cuda.get_device_name())
    table = read(Path(path))
    apply(table)
    return table


def forget_tuned(gpu: str) -> None:
    """Lets products on GPUs of that name run what runs without a table."""
    apply(Table(gpu, ()))


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> tuple[Entry, ...]:
    """New entries replace old ones for the same weight and bucket."""

    def key(entry: Entry) -> tuple[str, int, int, int]:
        return entry.layout, entry.out_features, entry.in_features, entry.tokens

    return tuple({**{key(e): e for e in old}, **{key(e): e for e in new}}[k] for k in sorted({*map(key, (*old, *new))}))
