"""Copying and hashing whole files."""

import os
from pathlib import Path

import xxhash

from .progress import Progress
from .safetensors_io import PIECE_BYTES


def copy_file(source: Path, target: Path, progress: Progress) -> tuple[int, str]:
    """Copies a file with its permissions. Returns its size and digest."""
    whole, size = xxhash.xxh3_128(), 0
    with open(source, "rb") as read, open(target, "xb") as write:
        while piece := read.read(PIECE_BYTES):
            whole.update(piece)
            write.write(piece)
            size += len(piece)
            progress.add(len(piece))
        os.fchmod(write.fileno(), os.fstat(read.fileno()).st_mode & 0o777)
    return size, whole.hexdigest()


def hash_file(path: Path, progress: Progress) -> tuple[int, str]:
    """Size and digest of a file."""
    whole, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as read:
        while piece := read.read(PIECE_BYTES):
            whole.update(piece)
            size += len(piece)
            progress.add(len(piece))
    return size, whole.hexdigest()
