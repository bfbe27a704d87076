"""`decompress`: the original files, byte for byte."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from .container import PackedFile
from .errors import CheckpointError, DamagedError, at
from .files import check_readable, copy_file
from .manifest import NAME, FileRecord, Manifest, list_folder, read_manifest
from .output import atomic_output, check_output
from .pipeline import check_threads
from .progress import Progress, ProgressCallback
from .unpack_file import FileUnpacker, read_packed_header


@dataclass
class DecompressSummary:
    """What `decompress_checkpoint` did. Sizes in bytes."""

    source: str
    output: str
    files: int = 0
    tensors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def open_folder(folder: Path) -> tuple[Manifest, dict[str, PackedFile]]:
    """The manifest and the headers of a packed folder. Raises DamagedError if they don't fit each other."""
    manifest = read_manifest(folder)
    packed = {}
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(at(path, f"is missing; {NAME} names it"))
        if record.kind == "packed":
            try:
                file = packed[name] = read_packed_header(path)
            except CheckpointError as error:  # it was one when the manifest was written
                raise DamagedError(str(error)) from None
            if (file.original.file_bytes, file.digest) != (record.size, record.digest):
                raise DamagedError(at(path, f"is another packed file than the one that {NAME} names"))
    return manifest, packed


def largest_tensor(files: dict[str, PackedFile]) -> int:
    return max((t.original.nbytes for f in files.values() for t in f.tensors), default=0)


def decompress_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    threads: int = 0,
    overwrite: bool = False,
    sync: bool = True,
    progress: ProgressCallback | None = None,
) -> DecompressSummary:
    """Makes the original files of a packed checkpoint (a folder or one file) again, byte for byte.

    `target` appears when all of it is written and every hash was right. `threads`: 0 for all cores, at most 16.
    `overwrite`: replace a safetensors file, a packed folder, or a folder that holds nothing but these files. `sync`:
    wait until it is on the disk before it gets its name, so that a loss of power leaves nothing half-written there.

    Raises DamagedError (a ValueError) if packed bytes aren't what was written, CheckpointError for anything else that
    can't be decompressed, OSError for what the system refuses.
    """
    begin = time.monotonic()
    source, target = check_readable(Path(source)), Path(target)
    threads = check_threads(threads)
    summary = DecompressSummary(str(source), str(target))
    if source.is_dir():
        manifest, packed = open_folder(source)
        check_output(source, target, overwrite, manifest.files)
        sizes = {n: packed[n].original.data_bytes if n in packed else r.size for n, r in manifest.files.items()}
        counter = Progress(progress, sum(sizes.values()))
        with atomic_output(target, overwrite=overwrite, files=manifest.files, sync=sync, progress=counter) as temporary:
            _folder(source, temporary, manifest, packed, threads, summary, counter)
    else:
        file = read_packed_header(source)
        check_output(source, target, overwrite)
        if target.suffix != ".safetensors":
            raise CheckpointError(at(target, "expected a name that ends in .safetensors, as the input is such a file"))
        counter = Progress(progress, file.original.data_bytes)
        counter.start(source.name)
        with atomic_output(target, overwrite=overwrite, sync=sync, progress=counter) as temporary:
            largest = largest_tensor({source.name: file})
            FileUnpacker(source, file, counter).write(temporary, threads=threads, largest=largest)
        _count(summary, file)
        summary.bytes_in, summary.bytes_out = file.header.file_bytes, file.original.file_bytes
    summary.seconds = time.monotonic() - begin
    return summary


def _count(summary: DecompressSummary, file: PackedFile) -> None:
    summary.files += 1
    summary.tensors += len(file.tensors)


def _folder(
    source: Path,
    target: Path,
    manifest: Manifest,
    packed: dict[str, PackedFile],
    threads: int,
    summary: DecompressSummary,
    progress: Progress,
) -> None:
    largest = largest_tensor(packed)
    target.mkdir()
    for name in manifest.folders:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name, record in manifest.files.items():
        progress.start(name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name in packed:
            unpacker = FileUnpacker(source / name, packed[name], progress)
            unpacker.write(target / name, threads=threads, largest=largest)
            _count(summary, packed[name])
        else:
            _restore(source / name, target / name, record, progress)
            summary.files += 1
    summary.bytes_in = sum((source / name).stat().st_size for name in [*manifest.files, NAME])
    summary.bytes_out = sum(record.size for record in manifest.files.values())
    more = [name for name in list_folder(source).files if name not in manifest.files and name != NAME]
    if more:
        summary.notes.append(f"not in {NAME}, left out: {', '.join(more)}")


def _restore(source: Path, target: Path, record: FileRecord, progress: Progress) -> None:
    """A file that isn't packed."""
    if record.original is not None:
        target.write_bytes(record.original)
        target.chmod(source.stat().st_mode & 0o777)
        progress.add(record.size)
        return
    found = copy_file(source, target, progress)
    if found != (record.size, record.digest):
        raise DamagedError(at(source, f"its size and hash are {found}, expected {(record.size, record.digest)}"))
