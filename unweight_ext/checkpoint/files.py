"""Whole files: which can be read, copying, hashing."""

import os
import stat
from pathlib import Path

import xxhash

from .errors import CheckpointError, at
from .progress import Progress
from .safetensors_io import PIECE_BYTES


def check_readable(path: Path) -> Path:
    """The path of a file or folder, be it through links. Pipes, which would hang, and devices have no size or place."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        what = f"a link to nothing: {os.readlink(path)}" if path.is_symlink() else "doesn't exist"
        raise FileNotFoundError(at(path, what)) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(at(path, "neither a file nor a folder"))
    return path


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
