"""Reading and writing safetensors files byte for byte.

The safetensors library hands out tensors; here the exact header text, offsets and bytes are needed, and streams that
never hold more than one tensor.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, at

# Bits an element, for every dtype that safetensors 0.8 knows.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

METADATA = "__metadata__"
MAX_HEADER = 100_000_000  # the safetensors library refuses more
_MAX_IO = 1 << 30  # Linux moves at most 2 GiB a call
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a safetensors file. `start` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: its exact text, padding included, and what that says."""

    text: bytes
    metadata: dict[str, str]
    entries: tuple[Entry, ...]  # in the order of the text

    @property
    def data_start(self) -> int:
        return 8 + len(self.text)

    @property
    def data_bytes(self) -> int:
        return max((e.end for e in self.entries), default=0)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes

    @property
    def prefix(self) -> bytes:
        """Everything before the data."""
        return struct.pack("<Q", len(self.text)) + self.text

    def in_file_order(self) -> list[Entry]:
        return sorted(self.entries, key=lambda e: (e.start, e.end))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} is there twice")
            seen.add(name)
    return result


def _is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8. JSON's escapes can make others, which no reader of files takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


PIECE_BYTES = 8 << 20  # how much is copied or hashed at once
_MOST_BITS = 1 << 65


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _parse_entry(path: Path | str, name: str, value: Any) -> Entry:
    def bad(what: str) -> CheckpointError:
        return CheckpointError(at(path, f"tensor {name!r}: {what}"))

    if not isinstance(value, dict):
        raise bad(f"its entry is {type(value).__name__}, expected an object with dtype, shape and data_offsets")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise bad(f"no {key!r} in the header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise bad(f"shape {shape!r}, expected a list of numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise bad(f"data_offsets {offsets!r}, expected two numbers")
    start, end = offsets
    if start > end:
        raise bad(f"data_offsets {offsets}, expected the first not to be above the second")
    bits = DTYPE_BITS[dtype]
    for size in sorted(shape):  # zeros first
        bits *= size
        if bits > _MOST_BITS:  # or a hostile shape takes minutes to multiply
            held = f"data_offsets {offsets} hold {end - start} bytes"
            raise bad(f"{held}, expected more than 2^62 for a shape of {len(shape)} dimensions")
    if bits != 8 * (end - start):
        raise bad(f"data_offsets {offsets} hold {end - start} bytes, expected {bits / 8:g} for {dtype} {shape}")
    return Entry(name, dtype, tuple(shape), start, end)


def _no_header(text: bytes) -> str:
    return f"not a safetensors file: the header starts with {text[:16]!r}, expected '{{'"


def parse_header(path: Path | str, text: bytes) -> Header:
    """Checks the header's text as the safetensors library does. `path` is for messages."""
    if not text.startswith(b"{"):
        raise CheckpointError(at(path, _no_header(text)))
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(at(path, f"not a safetensors file: the header isn't valid JSON ({error})")) from None
    metadata = content.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(at(path, f"{METADATA}: expected an object of strings"))
    for name in [*metadata, *metadata.values(), *content]:
        if not _is_text(name):
            raise CheckpointError(at(path, f"the header has {name!r}, which UTF-8 has no form for"))
    header = Header(text, metadata, tuple(_parse_entry(path, name, value) for name, value in content.items()))
    position, previous = 0, None
    for entry in header.in_file_order():
        if entry.start != position:
            how = "overlaps" if entry.start < position else "leaves a hole after"
            raise CheckpointError(
                at(path, f"tensor {entry.name!r} {how} {previous!r}: it starts at {entry.start}, expected {position}")
            )
        position, previous = entry.end, entry.name
    return header


def read_header(path: Path, fd: int) -> Header:
    """The header of an open file. Raises CheckpointError unless it describes the whole file and nothing else."""
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, 32, 0)
    if prefix.startswith(_LFS_POINTER):
        raise CheckpointError(at(path, "a Git LFS pointer, not the file itself; `git lfs pull` fetches it"))
    if size < 8:
        raise CheckpointError(at(path, f"{size} bytes, expected a safetensors file of at least 8"))
    if prefix[8:9] not in (b"{", b""):
        raise CheckpointError(at(path, _no_header(prefix[8:])))
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > MAX_HEADER:
        raise CheckpointError(
            at(path, f"not a safetensors file: a header of {length} bytes, expected at most {MAX_HEADER}")
        )
    if 8 + length > size:
        raise CheckpointError(at(path, f"truncated: {size} bytes, expected {8 + length} for the header alone"))
    text = bytearray(length)
    read_into(path, fd, memoryview(text), 8)
    header = parse_header(path, bytes(text))
    if header.file_bytes != size:
        how = "truncated" if header.file_bytes > size else "too long"
        raise CheckpointError(at(path, f"{how}: {size} bytes, expected {header.file_bytes} by its header"))
    return header


def header_text(metadata: dict[str, str], entries: list[Entry]) -> bytes:
    """A header in the form the safetensors library writes, without padding."""
    content: dict[str, Any] = {METADATA: metadata} if metadata else {}
    for e in entries:
        content[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.end]}
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def read_into(path: Path | str, fd: int, view: memoryview, offset: int) -> None:
    """Fills `view` from the file."""
    while view:
        n = os.preadv(fd, [view[:_MAX_IO]], offset)
        if n == 0:
            raise CheckpointError(at(path, f"truncated while it was read: nothing at byte {offset}"))
        view, offset = view[n:], offset + n


def write_all(fd: int, view: memoryview | bytes, offset: int) -> None:
    """Writes all of `view` at `offset`."""
    view = memoryview(view)
    while view:
        n = os.pwrite(fd, view[:_MAX_IO], offset)
        view, offset = view[n:], offset + n


@contextmanager
def reading(path: Path | str, fd: int, size: int, offset: int) -> Iterator[memoryview]:
    """The bytes of a part of a file, for as long as the context lasts.

    They are copied: a map would cost less, but a file that somebody truncates meanwhile would kill the process.
    """
    # Not zeroed. The allocator hands the same memory out again; memory.Resident keeps it within the budget.
    view = memoryview(np.empty(size, np.uint8))
    read_into(path, fd, view, offset)
    yield view


def advise_soon(fd: int, size: int, offset: int) -> None:
    """Tells the system that a part of a file is read soon."""
    if hasattr(os, "posix_fadvise") and size:
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
