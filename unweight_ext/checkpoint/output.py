"""Outputs that are there as a whole or not at all: written beside, then renamed."""

import ctypes
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError, at

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _looks_like_output(path: Path) -> bool:
    """Whether a path is something that these commands write, so that replacing it can't destroy anything else."""
    if path.is_symlink():
        return False
    if path.is_file():
        return path.suffix == ".safetensors"
    return next(path.iterdir(), None) is None or any(path.rglob("*.safetensors"))


def check_output(source: Path, target: Path, overwrite: bool) -> None:
    """Raises unless `target` can be written. `source` is what it is made from."""
    here, there = source.resolve(), target.resolve()
    if here == there:
        raise CheckpointError(at(target, "the output is the input"))
    if here in there.parents:
        raise CheckpointError(at(target, f"the output lies inside the input {source}"))
    if there in here.parents:
        raise CheckpointError(at(target, f"the output would replace a folder that holds the input {source}"))
    if not target.absolute().parent.is_dir():
        raise CheckpointError(at(target, f"the folder {target.absolute().parent} doesn't exist"))
    if not _exists(target):
        return
    if not overwrite:
        raise FileExistsError(at(target, "exists already; --overwrite (overwrite=True) replaces it"))
    if there == Path.cwd() or there in Path.cwd().parents or there == Path.home() or not _looks_like_output(target):
        raise CheckpointError(at(target, "exists and doesn't look like a checkpoint; it isn't replaced"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths at once. False where the system or the file system can't."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _put(temporary: Path, target: Path, overwrite: bool) -> None:
    if not _exists(target):
        temporary.rename(target)
    elif not overwrite:  # somebody else made it meanwhile
        raise FileExistsError(at(target, "exists already"))
    elif _exchange(temporary, target):
        _remove(temporary)
    else:
        old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
        target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            old.rename(target)
            raise
        _remove(old)


@contextmanager
def atomic_output(target: Path, *, overwrite: bool = False, keep_as: Path | None = None) -> Iterator[Path]:
    """A path beside `target` to write to, file or folder, renamed to `target` at the end.

    After an error or an interruption it is removed, unless `keep_as` names a folder to work in and to keep.
    """
    temporary = keep_as or target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        _put(temporary, target, overwrite)
    except BaseException:
        if keep_as is None:
            _remove(temporary)
        raise
