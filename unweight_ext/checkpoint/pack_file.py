"""Packs one safetensors file."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from .codec import PACK_COST, bytes_of, is_experts, is_packable, pack_bytes
from .container import (
    ALIGNMENT,
    NAMES_KEY,
    NO_DIGEST,
    PREFIX,
    Stored,
    build_header,
    default_original,
    digest,
    is_packed,
    matrix_shape,
    seal_header,
)
from .errors import CheckpointError, at
from .memory import memory_budget
from .pipeline import Stage, run_jobs
from .progress import Progress
from .safetensors_io import DTYPE_BITS, PIECE_BYTES, Entry, Header, advise_soon, read_header, reading, write_all
from .unpack_file import read_packed_header

_BATCH_TENSORS = 256
_AHEAD = 64 << 20  # how far ahead the disk is asked to read


def read_source_header(path: Path) -> Header:
    """The header of a file that is to be packed."""
    with open(path, "rb") as file:
        header = read_header(path, file.fileno())
    if is_packed(header):
        raise CheckpointError(at(path, "already packed"))
    reserved = [key for key in header.metadata if key.startswith(PREFIX)]
    if reserved:
        raise CheckpointError(at(path, f"its metadata has the key {reserved[0]!r}; names in {PREFIX}* are reserved"))
    return header


@dataclass
class _Copy:
    """Tensors that are stored as they are and follow each other, in the file and in the output."""

    entries: list[Entry]
    nbytes: int = 0
    target: int = 0  # in the stored data

    @property
    def cost(self) -> int:
        return min(self.nbytes, PIECE_BYTES)

    kept = cost


@dataclass
class _Pack:
    """One tensor to pack, and what has become of it."""

    entry: Entry
    name: str  # if it pays
    digest: str = NO_DIGEST
    packed: Tensor | None = None
    target: int = 0  # in the stored data

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    @property
    def cost(self) -> int:
        return int(PACK_COST * self.entry.nbytes)

    @property
    def kept(self) -> int:
        return self.entry.nbytes if self.packed is None else self.packed.numel()


def _copies(entries: list[Entry]) -> Iterator[_Copy]:
    """Small tensors share a job."""
    job = _Copy([])
    for e in entries:
        follows = job.entries and job.entries[-1].end == e.start
        if not follows or job.nbytes + e.nbytes > PIECE_BYTES or len(job.entries) == _BATCH_TENSORS:
            if job.entries:
                yield job
            job = _Copy([])
        job.entries.append(e)
        job.nbytes += e.nbytes
    if job.entries:
        yield job


def _fills_16(entry: Entry) -> bool:
    """Whether a tensor takes a multiple of 16 bytes, packed or not, whatever its packed size is."""
    return (is_experts(entry) or entry.shape[0] % 16 == 0) and entry.nbytes % 16 == 0


def _state(fd: int) -> tuple[int, int, int]:
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class FilePacker:
    """Packs one file: payloads are written when they are ready, the header last, in room kept for it.

    The order of the stored tensors depends on their names, dtypes and shapes alone, so the same file always gives the
    same bytes.
    """

    def __init__(self, source: Path, header: Header, names: dict[str, str], layout: str, progress: Progress) -> None:
        self.source, self.header, self.layout, self.progress = source, header, layout, progress
        entries = header.in_file_order()
        packs = [_Pack(e, names[e.name]) for e in entries if is_packable(e, layout)]
        as_is = [e for e in entries if not is_packable(e, layout)]
        # In this order everything is aligned to its elements, and most packed matrices to 16 bytes or more.
        wide = sorted((e for e in as_is if DTYPE_BITS[e.dtype] >= 16), key=lambda e: -DTYPE_BITS[e.dtype])
        self.jobs: list[_Copy | _Pack] = [
            *(p for p in packs if _fills_16(p.entry)),
            *_copies(wide),
            *(p for p in packs if not _fills_16(p.entry)),
            *_copies([e for e in as_is if DTYPE_BITS[e.dtype] < 16]),
        ]
        self.stored: list[Stored] = []  # in the order of the stored data
        self.digests: dict[str, str] = {}
        self.end = 0
        self._to_advise = iter(packs)
        self._ahead = 0
        self._advise_lock = threading.Lock()

    def run(self, target: Path, *, threads: int, largest: int) -> tuple[Stored, ...]:
        """Writes the packed file. Returns what it holds."""
        length = self._header_room()
        with open(self.source, "rb") as source, open(target, "xb") as out:
            self._in, self._out = source.fileno(), out.fileno()
            before = _state(self._in)
            self._in_start, self._out_start = self.header.data_start, 8 + length
            stage: Stage[_Copy | _Pack] = Stage(self._work, self._place, self._finish)
            run_jobs(self.jobs, stage, threads=threads, budget=memory_budget(largest))
            stored = [Stored(s.original, s.stored, self.digests[s.original.name]) for s in self.stored]
            text = seal_header(build_header(self.header, self.layout, stored), length)
            os.ftruncate(self._out, self._out_start + self.end)
            write_all(self._out, len(text).to_bytes(8, "little") + text, 0)
            os.fchmod(self._out, os.fstat(self._in).st_mode & 0o777)
            if before[0] != self.header.file_bytes or _state(self._in) != before:
                raise CheckpointError(at(self.source, "it changed while it was read"))
        try:
            read_packed_header(target)
        except CheckpointError as error:
            raise CheckpointError(
                at(self.source, f"can't be packed; its packed form would be unreadable: {error}")
            ) from None
        return tuple(stored)

    def _append(self, entry: Entry, name: str, dtype: str, shape: tuple[int, ...], size: int) -> int:
        """Gives a tensor its place in the stored data."""
        start, self.end = self.end, self.end + size
        self.stored.append(Stored(entry, Entry(name, dtype, shape, start, self.end), NO_DIGEST))
        return start

    def _header_room(self) -> int:
        """A length that the header can't exceed: every number, and either form of every entry, at its longest."""
        most = self.header.data_bytes
        pairs, more = [], 0
        for job in self.jobs:
            for e in job.entries if isinstance(job, _Copy) else [job.entry]:
                as_is = Entry(e.name, e.dtype, e.shape, most, most)
                if isinstance(job, _Copy):
                    pairs.append((e, as_is))
                    continue
                shape = matrix_shape(e.shape, is_experts(e))
                as_packed = Entry(job.name, "U8", (*shape[:-1], 2 * shape[-1]), most, most)
                pairs.append((e, max(as_packed, as_is, key=lambda e: len(e.name) + len(str(e.shape)) + len(e.dtype))))
                if any(default_original(name) != e.name for name in (job.name, e.name)):
                    more += 2 * len(json.dumps([job.name, e.name])) + len(NAMES_KEY)
        longest = build_header(self.header, self.layout, [Stored(o, e, NO_DIGEST) for o, e in pairs])
        return -(-(8 + len(longest) + more) // ALIGNMENT) * ALIGNMENT - 8

    def _work(self, job: _Copy | _Pack, threads: int) -> None:
        if isinstance(job, _Copy):  # in _finish, when its place is known
            return
        self._advise(job.nbytes)
        with reading(self.source, self._in, job.nbytes, self._in_start + job.entry.start) as data:
            job.digest = digest(data)
            where = at(self.source, f"tensor {job.entry.name!r}")
            packed = pack_bytes(data, job.entry, self.layout, where, threads)
            if packed.numel() < job.nbytes:
                job.packed = packed

    def _copy(self, job: _Copy) -> None:
        if len(job.entries) == 1:
            entry = job.entries[0]
            self.digests[entry.name] = self._copy_large(entry, job.target)
        else:
            first = job.entries[0].start
            with reading(self.source, self._in, job.nbytes, self._in_start + first) as data:
                for e in job.entries:
                    self.digests[e.name] = digest(data[e.start - first : e.end - first])
                write_all(self._out, data, self._out_start + job.target)

    def _copy_large(self, entry: Entry, target: int) -> str:
        """Copies one tensor piece by piece. Returns its digest."""
        whole = xxhash.xxh3_128()
        for offset in range(0, entry.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, entry.nbytes - offset)
            with reading(self.source, self._in, size, self._in_start + entry.start + offset) as data:
                whole.update(data)
                write_all(self._out, data, self._out_start + target + offset)
        return whole.hexdigest()

    def _place(self, job: _Copy | _Pack) -> None:
        if isinstance(job, _Copy):
            job.target = self.end
            for e in job.entries:
                self._append(e, e.name, e.dtype, e.shape, e.nbytes)
            return
        entry = job.entry
        self.digests[entry.name] = job.digest
        if job.packed is not None:
            job.target = self._append(entry, job.name, "U8", tuple(job.packed.shape), job.packed.numel())
            return
        if self.end % 2:
            self._even_out()
        job.target = self._append(entry, entry.name, entry.dtype, entry.shape, entry.nbytes)

    def _even_out(self) -> None:
        """BF16 must not start at an odd byte: the last matrix (N odd) gets one more byte a row, zeros at its end."""
        before = self.stored.pop()
        last = before.stored
        rows, row_bytes = last.shape  # only such a matrix ends at an odd byte here
        self.end = last.start
        self._append(before.original, last.name, last.dtype, (rows, row_bytes + 1), rows * (row_bytes + 1))

    def _finish(self, job: _Copy | _Pack) -> None:
        if isinstance(job, _Copy):
            self._copy(job)
        elif job.packed is None:
            self._copy_large(job.entry, job.target)
        else:
            write_all(self._out, bytes_of(job.packed), self._out_start + job.target)
            job.packed = None
        self.progress.add(job.nbytes)

    def _advise(self, size: int) -> None:
        """Called when `size` bytes are about to be read: asks for as many more."""
        with self._advise_lock:
            self._ahead -= size
            while self._ahead < _AHEAD and (job := next(self._to_advise, None)) is not None:
                advise_soon(self._in, job.nbytes, self._in_start + job.entry.start)
                self._ahead += job.nbytes
