"""Outputs that are there as a whole or not at all: written beside, then renamed."""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from .container import digest
from .errors import CheckpointError, at
from .manifest import NAME, read_manifest
from .progress import Progress

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # by the system, or by this file system


def _real(path: Path) -> Path:
    """Path.resolve, which raises for links in a circle."""
    return Path(os.path.realpath(path))


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _foreign(path: Path, files: Collection[str]) -> str | None:
    """What of a path these commands didn't write, so that replacing it would destroy it; None if there is nothing.

    A folder must be empty, or every file in it must be named by its own manifest or be one of `files`, which are about
    to be written again.
    """
    if path.is_symlink():
        return "a link"
    if not path.is_dir():
        return None if path.is_file() and path.suffix == ".safetensors" else "not a .safetensors file"
    known = set(files)
    if (path / NAME).is_file():
        try:
            known |= {*read_manifest(path).files, NAME}
        except CheckpointError as error:
            return str(error)
    for folder, folders, names in os.walk(path):
        for name in [*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))]:
            found = Path(folder, name)
            if found.is_symlink() or found.relative_to(path).as_posix() not in known:
                return f"it holds {found.relative_to(path)}"
    return None


def _check_replaceable(target: Path, files: Collection[str]) -> None:
    there = _real(target)
    foreign = _foreign(target, files)
    if there == _real(Path(os.path.expanduser("~"))):  # not Path.home, which raises where there is none
        foreign = "a home folder"
    elif there == Path.cwd() or there in Path.cwd().parents:
        foreign = "it holds the current folder"
    if foreign is not None:
        raise CheckpointError(at(target, f"exists and doesn't look like a checkpoint ({foreign}); it isn't replaced"))


def check_output(source: Path, target: Path, overwrite: bool, files: Collection[str] = ()) -> None:
    """Raises unless `target` can be written. `source` is what it is made from.

    `files`: what is to be written to a folder that may be a plain checkpoint, one without a manifest.
    """
    here, there = _real(source), _real(target)
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
        raise FileExistsError(at(target, "exists already; --overwrite (overwrite=True) replaces a checkpoint"))
    _check_replaceable(target, files)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _renameat2(a: Path, b: Path, flag: int) -> int:
    """Linux's rename with a flag. Returns 0 or an errno; ENOSYS where there is no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if function is None:
        return errno.ENOSYS
    if function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flag) == 0:
        return 0
    return ctypes.get_errno()


def _rename_new(temporary: Path, target: Path) -> None:
    """Renames to a name that must be free. Raises FileExistsError, also if it was taken in this very moment."""
    error = _renameat2(temporary, target, _RENAME_NOREPLACE)
    if error in _UNSUPPORTED:
        try:
            if not temporary.is_dir():
                os.link(temporary, target)
                temporary.unlink()
                return
        except FileExistsError:
            error = errno.EEXIST
        except OSError:  # no links there
            pass
        if error != errno.EEXIST and not _exists(target):
            temporary.rename(target)  # a folder replaces at most an empty one
            return
        error = errno.EEXIST
    if error:
        raise OSError(error, os.strerror(error), str(target))  # EEXIST makes it a FileExistsError


def _replace(temporary: Path, target: Path) -> None:
    if _renameat2(temporary, target, _RENAME_EXCHANGE) == 0:
        _remove(temporary)
        return
    old = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def _put(temporary: Path, target: Path, overwrite: bool, files: Collection[str]) -> None:
    try:
        _rename_new(temporary, target)
    except FileExistsError:
        if not overwrite:  # somebody else made it meanwhile
            raise FileExistsError(at(target, "exists already")) from None
        _check_replaceable(target, files)  # once more: what lies there now
        _replace(temporary, target)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # a file system that knows no such thing
            raise
    finally:
        os.close(fd)


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for folder, _, names in os.walk(path, topdown=False):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
    else:
        _sync(path)


def _boot_mark() -> str:
    """Tells this run of this machine's kernel from all others; empty where there is no way to."""
    try:
        return digest(Path("/proc/sys/kernel/random/boot_id").read_bytes())[:8] + "-"
    except OSError:
        return ""


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:  # held by another, or the file system knows no locks
        return False
    return True


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A free name beside `target`; first, what killed runs left under such names is removed.

    All runs hold a shared lock on the folder, so who gets it alone knows that no other is at work. Other machines may
    not see the lock: only names with this one's mark are removed, and only who has the lock gives his output the mark.
    """
    start, mark = f".{target.name}.tmp-", _boot_mark()
    folder = os.open(target.absolute().parent, os.O_RDONLY)
    try:
        if mark and _locked(folder, fcntl.LOCK_EX):
            for path in target.absolute().parent.iterdir():
                if path.name.startswith(start + mark):
                    with suppress(OSError):  # somebody else's
                        _remove(path)
        if not _locked(folder, fcntl.LOCK_SH):
            mark = ""
        yield target.with_name(start + mark + secrets.token_hex(4))
    finally:
        os.close(folder)


@contextmanager
def atomic_output(
    target: Path,
    *,
    overwrite: bool = False,
    keep_as: Path | None = None,
    files: Collection[str] = (),
    sync: bool = True,
    progress: Progress | None = None,
) -> Iterator[Path]:
    """A path beside `target` to write to, file or folder, renamed to `target` at the end.

    After an error or an interruption it is removed, unless `keep_as` names a folder to work in and to keep. `files` is
    that of `check_output`. `sync`: all of it is on the disk before it gets its name, so that not even a loss of power
    leaves a part of it there; `progress` is told.
    """
    with _temporary(target) if keep_as is None else nullcontext(keep_as) as temporary:
        try:
            yield temporary
            if sync:
                if progress is not None:
                    progress.start("to the disk")
                _sync_tree(temporary)
            _put(temporary, target, overwrite, files)
            if sync:
                _sync(target.absolute().parent)
        except BaseException:
            if keep_as is None:
                _remove(temporary)
            raise
