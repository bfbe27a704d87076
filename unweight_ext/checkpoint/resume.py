"""Which files of an interrupted `compress` are finished and can be kept."""

import fcntl
import json
from pathlib import Path
from types import TracebackType

from .container import Stored
from .errors import CheckpointError, at
from .pipeline import check_threads
from .progress import Progress
from .safetensors_io import Header
from .unpack_file import FileUnpacker, read_packed_header

NAME = ".unweight-unfinished.json"


class Journal:
    """A list, in the unfinished folder, of finished files and of what their source was then.

    A file is taken over if its source has the same size, time and header, and if decoding it gives the hashes that it
    should: after a crash of the machine a file may have its name and not its data.
    """

    def __init__(self, source: Path, target: Path, layout: str, *, enabled: bool) -> None:
        self.source, self.target, self.layout, self.enabled = source, target, layout, enabled
        self.path = target / NAME
        self.files: dict[str, list[int]] = {}

    def __enter__(self) -> "Journal":
        if self.enabled:
            self.target.mkdir(exist_ok=True)
            self._lock = open(self.path, "a+")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise CheckpointError(at(self.target, "another run is at work on it")) from None
            self.files = self._read()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.enabled:
            self._lock.close()

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
        return [stat.st_size, stat.st_mtime_ns]

    def finished(self, name: str, header: Header) -> tuple[Stored, ...] | None:
        """What a finished file holds; None if it has to be made."""
        path = self.target / name
        if not self.enabled or self.files.get(name) != self._state(name) or not path.is_file():
            return None
        try:
            file = read_packed_header(path)
        except CheckpointError:
            return None
        if file.original.text != header.text or file.layout != self.layout:
            return None
        largest = max((e.nbytes for e in header.entries), default=0)
        unpacker = FileUnpacker(path, file, Progress(None, 0))
        if unpacker.check(None, threads=check_threads(0), largest=largest):
            return None
        return file.tensors

    def add(self, name: str) -> None:
        if self.enabled:
            self._lock.write(json.dumps([name, self._state(name)]) + "\n")
            self._lock.flush()

    def clean(self, shards: set[str]) -> None:
        """Removes what an interrupted run left beside the files that may be finished."""
        if not self.enabled:
            return
        for path in sorted(self.target.rglob("*"), reverse=True):
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path != self.path and path.relative_to(self.target).as_posix() not in shards & self.files.keys():
                path.unlink()

    def remove(self) -> None:
        """Nothing is unfinished any more."""
        if self.enabled:
            self.path.unlink(missing_ok=True)
