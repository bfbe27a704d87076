"""Which files of an interrupted `compress` are finished and can be kept."""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .container import Stored
from .errors import CheckpointError, at
from .progress import Progress
from .safetensors_io import Header
from .unpack_file import FileUnpacker, read_packed_header


class Journal:
    """A list, beside the unfinished folder, of finished files and of what their source was then.

    A file is taken over if its source has the same size, times, inode and header, and if decoding it gives the hashes
    that it should: after a crash of the machine a file may have its name and not its data. Without a folder to keep it
    does nothing.
    """

    def __init__(self, source: Path, target: Path | None, layout: str) -> None:
        self.source, self.target, self.layout = source, target, layout
        self.files: dict[str, list[int]] = {}
        self.before: dict[str, list[int]] = {}  # states of sources before they were read

    def __enter__(self) -> "Journal":
        if self.target is not None:
            self.path = self.target.with_name(f"{self.target.name}.json")  # in the folder a file may have any name
            self._check_ours()
            self._lock = self._locked()
            self.files = self._read()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.target is not None:
            if kind is None:  # nothing is unfinished any more
                self.path.unlink(missing_ok=True)
            self._lock.close()

    def _check_ours(self) -> None:
        """What an interrupted run left is emptied of all that isn't finished: it must be one's."""
        if self.target.is_symlink():
            raise CheckpointError(at(self.target, "a link, expected the folder of an interrupted run, or nothing"))
        if self.target.exists() and not self.path.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise CheckpointError(at(self.target, f"not of an interrupted run, which would have {self.path.name}"))

    def _locked(self) -> TextIO:
        while True:
            lock = open(self.path, "a+")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise CheckpointError(at(self.path, "another run is at work on it")) from None
            if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(lock.fileno())):
                return lock
            lock.close()  # of a run that ended between the two steps

    def _read(self) -> dict[str, list[int]]:
        self._lock.seek(0)
        files = {}
        for line in self._lock:
            try:
                name, state = json.loads(line)
                files[str(name)] = list(state)
            except (ValueError, TypeError):  # the last line of a crash
                continue
        return files

    def _state(self, name: str) -> list[int]:
        stat = (self.source / name).stat()
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def finished(self, name: str, header: Header, threads: int) -> tuple[Stored, ...] | None:
        """What a finished file holds; None if it has to be made."""
        if self.target is None:
            return None
        self.before[name] = self._state(name)
        if self.files.get(name) != self.before[name]:
            return None
        path = self.target / name
        if not path.is_file():
            return None
        try:
            file = read_packed_header(path)
        except CheckpointError:
            return None
        if file.original.text != header.text or file.layout != self.layout:
            return None
        largest = max((e.nbytes for e in header.entries), default=0)
        unpacker = FileUnpacker(path, file, Progress(None, 0))
        if unpacker.check(None, threads=threads, largest=largest):
            return None
        return file.tensors

    def add(self, name: str) -> None:
        if self.target is not None:
            self._lock.write(json.dumps([name, self.before[name]]) + "\n")
            self._lock.flush()

    def clean(self, shards: set[str]) -> None:
        """Removes what an interrupted run left beside the files that may be finished."""
        if self.target is None:
            return
        for path in sorted(self.target.rglob("*"), reverse=True):
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.target).as_posix() not in shards & self.files.keys():
                path.unlink()
