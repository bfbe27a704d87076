"""`compress`: a folder or a safetensors file becomes a packed one."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .codec import check_layout, is_packable
from .container import FORMAT, Stored, digest, file_digest, packed_name
from .errors import CheckpointError, at
from .files import check_readable, copy_file
from .manifest import MAX_EDITED, NAME, FileRecord, Listing, Manifest, list_folder
from .output import atomic_output, check_output
from .pack_file import FilePacker, read_source_header
from .pipeline import check_threads
from .progress import Progress, ProgressCallback
from .resume import Journal
from .safetensors_io import Header
from .verify import verify_checkpoint

QUANT_METHOD = "unweight"


@dataclass
class CompressSummary:
    """What `compress_checkpoint` did. Sizes in bytes."""

    source: str
    output: str
    layout: str
    files: int = 0
    tensors: int = 0
    packed: int = 0  # tensors
    weights: int = 0  # in packed tensors
    bytes_in: int = 0  # all files
    bytes_out: int = 0
    safetensors_in: int = 0
    safetensors_out: int = 0
    packed_bytes: int = 0  # of packed tensors
    stored_dtypes: dict[str, int] = field(default_factory=dict)  # bytes of what is stored as it is
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resumed: int = 0  # files taken over from an interrupted run
    verified: bool = False
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Packed safetensors files in parts of the original ones."""
        return self.safetensors_out / max(1, self.safetensors_in)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.packed_bytes / max(1, self.weights)

    def count(self, header: Header, stored: tuple[Stored, ...]) -> None:
        self.tensors += len(header.entries)
        for s in stored:
            if s.packed:
                self.packed += 1
                self.weights += s.original.numel
                self.packed_bytes += s.stored.nbytes
        packed = {s.original.name for s in stored if s.packed}
        for e in header.entries:
            if e.name not in packed:
                self.stored_dtypes[e.dtype] = self.stored_dtypes.get(e.dtype, 0) + e.nbytes


@dataclass(frozen=True)
class Index:
    """A `*.index.json` that says which file holds which tensor."""

    name: str
    content: dict[str, Any]
    shards: dict[str, str]  # tensor -> file, as a path in the root folder


def read_index(root: Path, name: str, headers: dict[str, Header]) -> Index | None:
    """None if the file is an index of something else than safetensors files."""
    path = root / name
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(at(path, f"not valid JSON ({error})")) from None
    if not isinstance(content, dict) or not isinstance(weight_map := content.get("weight_map"), dict):
        return None
    if not any(str(file).endswith(".safetensors") for file in weight_map.values()):
        return None
    folder = name.rpartition("/")[0]
    shards = {}
    for tensor, file in weight_map.items():
        shard = f"{folder}/{file}" if folder else str(file)
        if shard not in headers:
            raise CheckpointError(at(path, f"names {file!r} for tensor {tensor!r}, and there is no such file"))
        shards[tensor] = shard
    names = {shard: {e.name for e in headers[shard].entries} for shard in set(shards.values())}
    for tensor, shard in shards.items():
        if tensor not in names[shard]:
            raise CheckpointError(at(path, f"says that {shard!r} holds tensor {tensor!r}, and it doesn't"))
    return Index(name, content, shards)


def choose_names(headers: dict[str, Header], layout: str) -> dict[str, dict[str, str]]:
    """For each file the names of its tensors once packed. Files of one folder share their names."""
    folders: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        folders.setdefault(name.rpartition("/")[0], {})[name] = header
    result = {}
    for files in folders.values():
        taken = {e.name for header in files.values() for e in header.entries}
        names: dict[str, str] = {}
        for header in files.values():
            for e in header.in_file_order():
                if is_packable(e, layout) and e.name not in names:
                    names[e.name] = packed_name(e.name, taken)
                    taken.add(names[e.name])
        result |= dict.fromkeys(files, names)
    return result


class FolderCompressor:
    """Compresses a folder: one file after the other, each with all threads."""

    def __init__(self, source: Path, layout: str, threads: int, callback: ProgressCallback | None) -> None:
        self.source, self.layout, self.threads = source, layout, threads
        self.listing: Listing = list_folder(source)
        if NAME in self.listing.files:
            raise CheckpointError(at(source, f"already packed: it has a file {NAME}"))
        shards = [name for name in self.listing.files if name.endswith(".safetensors")]
        if not shards:
            raise CheckpointError(at(source, "no .safetensors file in it"))
        self.headers = {name: read_source_header(source / name) for name in shards}
        indexes = (read_index(source, n, self.headers) for n in self.listing.files if n.endswith(".index.json"))
        self.indexes = [index for index in indexes if index is not None]
        self.names = choose_names(self.headers, layout)
        largest = max((e.nbytes for h in self.headers.values() for e in h.entries), default=0)
        self.largest = largest
        self.sizes = {name: (source / name).stat().st_size for name in self.listing.files}
        self.progress = Progress(callback, sum(self.sizes.values()))
        self.stored: dict[str, tuple[Stored, ...]] = {}  # by file that is packed
        self.records: dict[str, FileRecord] = {}

    def run(self, target: Path, summary: CompressSummary, journal: Journal) -> None:
        target.mkdir(exist_ok=True)
        journal.clean(set(self.headers))
        for name in [*self.listing.folders, *(n.rpartition("/")[0] for n in self.listing.files)]:
            (target / name).mkdir(parents=True, exist_ok=True)
        for name in self.headers:
            self.progress.start(name)
            self._pack(name, target, summary, journal)
        edited = {index.name: self._index(index) for index in self.indexes}
        edited |= {name: self._config(name, summary) for name in self._configs()}
        for name in self.listing.files:
            if name not in self.records:
                self.progress.start(name)
                self._other(name, target, edited.get(name))
        records = {name: self.records[name] for name in self.listing.files}
        (target / NAME).write_bytes(Manifest(self.layout, records, tuple(self.listing.folders)).to_bytes())
        summary.files = len(records)
        summary.left_out = self.listing.left_out
        summary.bytes_in = sum(self.sizes.values())
        summary.bytes_out = sum((target / name).stat().st_size for name in [*records, NAME])
        summary.safetensors_in = sum(self.sizes[name] for name in self.headers)
        summary.safetensors_out = sum((target / name).stat().st_size for name in self.headers)

    def _pack(self, name: str, target: Path, summary: CompressSummary, journal: Journal) -> None:
        header, source, path = self.headers[name], self.source / name, target / name
        if not any(is_packable(e, self.layout) for e in header.entries):
            summary.count(header, ())
            return  # copied with the other files
        stored = journal.finished(name, header, self.threads)
        if stored is None:
            path.unlink(missing_ok=True)
            packer = FilePacker(source, header, self.names[name], self.layout, self.progress)
            stored = packer.run(path, threads=self.threads, largest=self.largest)
            journal.add(name)
        else:
            summary.resumed += 1
            self.progress.add(header.data_bytes)
        self.progress.add(header.data_start)
        self.stored[name] = stored
        digests = {s.original.name: s.digest for s in stored}
        self.records[name] = FileRecord("packed", header.file_bytes, file_digest(header, digests))
        summary.count(header, stored)

    def _other(self, name: str, target: Path, edited: bytes | None) -> None:
        """Copies a file that isn't packed, or writes what is to stand in its place."""
        source, path = self.source / name, target / name
        path.unlink(missing_ok=True)
        if edited is None:
            size, found = copy_file(source, path, self.progress)
            self.records[name] = FileRecord("copied", size, found)
            return
        original = source.read_bytes()
        if len(original) > MAX_EDITED:
            raise CheckpointError(at(source, f"{len(original)} bytes, expected at most {MAX_EDITED} of such a file"))
        path.write_bytes(edited)
        path.chmod(source.stat().st_mode & 0o777)
        self.records[name] = FileRecord("edited", len(original), digest(original), digest(edited), original)
        self.progress.add(len(original))

    def _index(self, index: Index) -> bytes:
        content = dict(index.content)
        total, weight_map = 0, {}
        names = {shard: {s.original.name: s.stored.name for s in self.stored.get(shard, ())} for shard in self.headers}
        for tensor, file in index.content["weight_map"].items():
            weight_map[names[index.shards[tensor]].get(tensor, tensor)] = file
        for shard in sorted(set(index.shards.values())):
            stored = self.stored.get(shard)
            total += sum(s.stored.nbytes for s in stored) if stored is not None else self.headers[shard].data_bytes
        metadata = content.get("metadata")
        content["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
        content["weight_map"] = weight_map
        return json.dumps(content, indent=2).encode() + b"\n"

    def _configs(self) -> list[str]:
        """The config.json beside each packed file."""
        folders = {name.rpartition("/")[0] for name in self.stored}
        wanted = {f"{folder}/config.json" if folder else "config.json" for folder in folders}
        return [name for name in self.listing.files if name in wanted]

    def _config(self, name: str, summary: CompressSummary) -> bytes | None:
        """The config with its quantization_config; None if it is to stay as it is."""
        path = self.source / name
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(at(path, f"not valid JSON ({error})")) from None
        if not isinstance(content, dict):
            raise CheckpointError(at(path, f"{type(content).__name__}, expected an object"))
        if content.get("quantization_config") is not None:
            method = content["quantization_config"]
            method = method.get("quant_method") if isinstance(method, dict) else method
            summary.notes.append(f"{name} keeps its quantization_config ({method}): decompress before loading")
            return None
        content["quantization_config"] = {"quant_method": QUANT_METHOD, "format": int(FORMAT), "layout": self.layout}
        return json.dumps(content, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def check_source(source: Path) -> Path:
    if not check_readable(source).is_dir() and source.suffix != ".safetensors":
        raise CheckpointError(at(source, "expected a folder or a .safetensors file"))
    return source


def compress_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: str = "auto",
    threads: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    sync: bool = True,
    progress: ProgressCallback | None = None,
) -> CompressSummary:
    """Packs the BF16 tensors of a checkpoint, without loss.

    `source`: a folder with safetensors files (a Hugging Face model or pipeline; subfolders too), or one such file.
    `target`: what to make; it appears when all of it is written. `layout`: of the packed tensors: `archive` (the
    smallest, what `auto` is), `huffman` or `nibble`. `threads`: 0 for all cores, at most 16. `overwrite`: replace a
    packed folder that holds nothing else, or a safetensors file. `resume` (folders): keep finished files of an
    interrupted run, and go on from them next time. `verify`: decode the result once before it appears. `sync`: wait
    until it is on the disk before it gets its name, so that a loss of power leaves nothing half-written there.
    `progress` is called with bytes done, bytes in all, and the file's name.

    Memory stays within three times the largest tensor + 64 MiB. Raises CheckpointError (a ValueError) for what can't be
    compressed, OSError for what the system refuses.
    """
    begin = time.monotonic()
    source, target = check_source(Path(source)), Path(target)
    layout, threads = check_layout(layout), check_threads(threads)
    check_output(source, target, overwrite)
    summary = CompressSummary(str(source), str(target), layout)
    if source.is_dir():
        unfinished = target.with_name(f".{target.name}.unfinished")
        keep = unfinished if resume else None
        compressor = FolderCompressor(source, layout, threads, progress)
        with (
            Journal(source, keep, layout) as journal,
            atomic_output(
                target, overwrite=overwrite, keep_as=keep, sync=sync, progress=compressor.progress
            ) as temporary,
        ):
            compressor.run(temporary, summary, journal)
            _verify(temporary, verify, threads, summary)
        if not resume and unfinished.is_dir():  # not removed: another run may be at work in it
            summary.notes.append(f"{unfinished} holds files of an interrupted --resume, not used by this run")
    else:
        if resume:
            raise CheckpointError(at(source, "only a folder can be resumed"))
        if target.suffix != ".safetensors":
            raise CheckpointError(at(target, "expected a name that ends in .safetensors, as the input is such a file"))
        header = read_source_header(source)
        counter = Progress(progress, header.file_bytes)
        with atomic_output(target, overwrite=overwrite, sync=sync, progress=counter) as temporary:
            _compress_file(source, header, temporary, layout, threads, summary, counter)
            _verify(temporary, verify, threads, summary)
    summary.seconds = time.monotonic() - begin
    return summary


def _verify(path: Path, wanted: bool, threads: int, summary: CompressSummary) -> None:
    if wanted:
        result = verify_checkpoint(path, threads=threads)
        if not result.ok:
            raise CheckpointError(f"the result doesn't verify, nothing was written: {result.problems[0]}")
        summary.verified = True


def _compress_file(
    source: Path,
    header: Header,
    target: Path,
    layout: str,
    threads: int,
    summary: CompressSummary,
    progress: Progress,
) -> None:
    names = choose_names({source.name: header}, layout)[source.name]
    progress.start(source.name)
    packer = FilePacker(source, header, names, layout, progress)
    largest = max((e.nbytes for e in header.entries), default=0)
    stored = packer.run(target, threads=threads, largest=largest)
    progress.add(header.data_start)
    summary.count(header, stored)
    summary.files = 1
    summary.bytes_in = summary.safetensors_in = header.file_bytes
    summary.bytes_out = summary.safetensors_out = target.stat().st_size
