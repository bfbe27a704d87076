"""`verify`: decodes everything in memory and compares hashes."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from .decompress import largest_tensor, open_folder
from .errors import CheckpointError, DamagedError, at
from .files import check_readable, hash_file
from .manifest import NAME, list_folder
from .pipeline import check_threads
from .progress import Progress, ProgressCallback
from .unpack_file import FileUnpacker, read_packed_header


@dataclass
class VerifySummary:
    """What `verify_checkpoint` found."""

    path: str
    against: str | None = None
    files: int = 0
    tensors: int = 0
    bytes: int = 0  # of the originals
    digests: dict[str, str] = field(default_factory=dict)  # of each original file
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    threads: int = 0,
    progress: ProgressCallback | None = None,
) -> VerifySummary:
    """Checks that a packed checkpoint (a folder or one file) gives its original files back, writing nothing.

    Every tensor is decoded, its checksums and its hash are checked; every other file is hashed. `against`: the original
    folder or file, which is read, hashed and compared too. What is wrong is in the summary's `problems`. Raises
    CheckpointError if `path` isn't a packed checkpoint at all, OSError for what the system refuses.
    """
    begin = time.monotonic()
    path, threads = check_readable(Path(path)), check_threads(threads)
    original = None if against is None else check_readable(Path(against))
    if original is not None and original.is_dir() != path.is_dir():
        raise CheckpointError(at(original, f"expected a {'folder' if path.is_dir() else 'file'}, as {path} is one"))
    summary = VerifySummary(str(path), None if original is None else str(original))
    try:
        if path.is_dir():
            _folder(path, original, threads, summary, progress)
        else:
            _file(path, original, threads, summary, progress)
    except DamagedError as error:
        summary.problems.append(str(error))
    summary.seconds = time.monotonic() - begin
    return summary


def _file(
    path: Path, original: Path | None, threads: int, summary: VerifySummary, callback: ProgressCallback | None
) -> None:
    file = read_packed_header(path)
    progress = Progress(callback, file.original.data_bytes)
    progress.start(path.name)
    unpacker = FileUnpacker(path, file, progress)
    summary.problems += unpacker.check(original, threads=threads, largest=largest_tensor({"": file}))
    summary.files, summary.tensors, summary.bytes = 1, len(file.tensors), file.original.file_bytes
    summary.digests[path.name] = file.digest


def _folder(
    path: Path, original: Path | None, threads: int, summary: VerifySummary, callback: ProgressCallback | None
) -> None:
    manifest, packed = open_folder(path)
    largest = largest_tensor(packed)
    sizes = {n: packed[n].original.data_bytes if n in packed else r.size for n, r in manifest.files.items()}
    progress = Progress(callback, sum(sizes.values()))
    problems = summary.problems
    for name, record in manifest.files.items():
        progress.start(name)
        other = None if original is None else original / name
        if other is not None and not other.is_file():
            problems.append(at(other, f"is missing; {path} was made from it"))
            other = None
        if name in packed:
            try:
                unpacker = FileUnpacker(path / name, packed[name], progress)
                problems += unpacker.check(other, threads=threads, largest=largest)
            except CheckpointError as error:  # the original isn't a safetensors file
                problems.append(str(error))
            summary.tensors += len(packed[name].tensors)
        else:
            found = hash_file(path / name, Progress(None, 0))[1]
            progress.add(record.size)  # not the file's: it may be edited
            if found != (record.stored_digest or record.digest):
                problems.append(at(path / name, "isn't what compress wrote, its hash differs"))
            if other is not None and hash_file(other, Progress(None, 0)) != (record.size, record.digest):
                problems.append(at(other, f"differs from the file that {path} was made from"))
        summary.files += 1
        summary.bytes += record.size
        summary.digests[name] = record.digest
    if original is not None:
        more = [n for n in list_folder(original).files if n not in manifest.files]
        problems += [at(original / n, f"isn't in {path / NAME}") for n in more]
