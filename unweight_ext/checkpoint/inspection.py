"""`inspect`: what each tensor of a packed or plain checkpoint takes, and what it could take."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..ops import LAYOUTS
from .codec import DISK_LAYOUT, UNPACK_COST, bytes_of, describe, is_packable, unpack_bytes
from .container import Stored, is_packed, parse_packed
from .errors import CheckpointError, at
from .files import check_readable
from .manifest import list_folder
from .memory import memory_budget
from .pipeline import Stage, check_threads, run_jobs
from .progress import Progress, ProgressCallback
from .safetensors_io import Entry, Header, read_header, read_into, reading

_PIECE = 1 << 16  # weights counted at once: what numpy makes of them stays in a cache
_HEAD_BYTES = 4096  # a packed matrix's header and code take less
_STORED = "stored"
# What `archive` takes above the entropy of single exponents, measured on all-mpnet-base-v2.
_ARCHIVE_OVERHEAD_BITS = 0.03


@dataclass
class TensorReport:
    """One tensor. Everything about exponents is None unless its dtype is BF16 and it has elements."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str  # of a packed tensor; `stored` for one that is as it was
    original_bytes: int
    stored_bytes: int
    bits_per_weight: float | None  # as stored
    exponent_entropy: float | None = None
    floor: float | None = None  # 8 + exponent_entropy: no code of single exponents takes less
    patches: int | None = None
    estimate: float | None = None  # bits per weight that compress would reach; plain BF16 checkpoints only


@dataclass
class Inspection:
    """A checkpoint's tensors and totals. Sizes in bytes."""

    path: str
    packed: bool
    tensors: list[TensorReport] = field(default_factory=list)
    original_bytes: int = 0  # of all safetensors files
    stored_bytes: int = 0
    estimated_bytes: int | None = None
    weights: int = 0  # BF16 weights that are, or would be, packed
    bits_per_weight: float | None = None  # of them
    floor: float | None = None
    seconds: float = 0.0


@dataclass
class _Job:
    """A BF16 tensor to look into."""

    tensor: Stored
    report: TensorReport
    read: int  # bytes

    @property
    def nbytes(self) -> int:
        return self.read

    @property
    def cost(self) -> int:
        return int(UNPACK_COST * self.report.original_bytes)

    @property
    def kept(self) -> int:
        return 0


def exponent_entropy(data: memoryview) -> float:
    """Bits an exponent takes at least in BF16 bytes, on average."""
    words = np.frombuffer(data, np.uint16)
    counts = np.zeros(512, np.int64)  # sign and exponent
    for start in range(0, len(words), _PIECE):
        counts += np.bincount(words[start : start + _PIECE] >> 7, minlength=512)
    p = counts.reshape(2, 256).sum(0) / len(words)
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum()) + 0.0


class _File:
    """One safetensors file, packed or not."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with open(path, "rb") as file:
            self.header: Header = read_header(path, file.fileno())
        self.packed = is_packed(self.header)
        if self.packed:
            parsed = parse_packed(path, self.header)
            self.original = parsed.original
            self.tensors = sorted(parsed.tensors, key=lambda t: t.original.start)
        else:
            self.original = self.header
            self.tensors = [Stored(e, e, "") for e in self.header.in_file_order()]

    def jobs(self) -> Iterator[_Job]:
        for t in self.tensors:
            e = t.original
            report = TensorReport(self.name, e.name, e.shape, e.dtype, _STORED, e.nbytes, t.stored.nbytes, None)
            if e.numel:
                report.bits_per_weight = 8 * t.stored.nbytes / e.numel
            yield _Job(t, report, t.stored.nbytes)

    def look(self, job: _Job, threads: int, fd: int, entropy: bool) -> None:
        stored, original, report = job.tensor.stored, job.tensor.original, job.report
        if original.dtype != "BF16" or not original.numel or not (entropy or job.tensor.packed):
            return
        start = self.header.data_start + stored.start
        if not entropy:
            layout, report.patches = describe(self._heads(stored, fd, start), stored, self._where(stored))
            report.layout = LAYOUTS[layout]
            return
        with reading(self.path, fd, stored.nbytes, start) as data:
            if job.tensor.packed:
                where = self._where(stored)
                layout, report.patches = describe(data, stored, where)
                report.layout = LAYOUTS[layout]
                weight = unpack_bytes(data, stored, original, where, threads)
                report.exponent_entropy = exponent_entropy(bytes_of(weight))
            else:
                report.exponent_entropy = exponent_entropy(data)
        report.floor = 8 + report.exponent_entropy
        if not self.packed and is_packable(original, DISK_LAYOUT):
            report.estimate = min(16.0, report.floor + _ARCHIVE_OVERHEAD_BITS)

    def _where(self, stored: Entry) -> str:
        return at(self.path, f"tensor {stored.name!r}")

    def _heads(self, stored: Entry, fd: int, start: int) -> memoryview:
        """A packed tensor of which only the first bytes of each matrix are read; the rest is zeros without pages."""
        view = memoryview(np.zeros(stored.nbytes, np.uint8))
        size = stored.shape[-2] * stored.shape[-1]
        for at_byte in range(0, stored.nbytes, size):
            read_into(self.path, fd, view[at_byte : at_byte + min(size, _HEAD_BYTES)], start + at_byte)
        return view


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    entropy: bool = True,
    threads: int = 0,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Reports on each tensor of a checkpoint (a folder or a safetensors file), packed or not.

    `entropy=False` reads headers only, and is fast. For a plain checkpoint, `estimate` says what `compress` would
    reach; it is computed from the entropy of the exponents and nothing is packed. Raises CheckpointError, OSError.
    """
    begin = time.monotonic()
    path, threads = check_readable(Path(path)), check_threads(threads)
    if path.is_dir():
        names = [name for name in list_folder(path).files if name.endswith(".safetensors")]
        if not names:
            raise CheckpointError(at(path, "no .safetensors file in it"))
        files = [_File(path / name, name) for name in names]
    else:
        files = [_File(path, path.name)]
    result = Inspection(str(path), any(f.packed for f in files))
    jobs = [list(f.jobs()) for f in files]
    counter = Progress(progress, sum(job.read for each in jobs for job in each))
    largest = max((job.report.original_bytes for each in jobs for job in each), default=0)
    for file, each in zip(files, jobs, strict=True):
        counter.start(file.name)
        _look(file, each, entropy, threads, largest, counter)
        result.tensors += [job.report for job in each]
        result.original_bytes += file.original.file_bytes
        result.stored_bytes += file.header.file_bytes
    _totals(result)
    result.seconds = time.monotonic() - begin
    return result


def _look(file: _File, jobs: list[_Job], entropy: bool, threads: int, largest: int, counter: Progress) -> None:
    with open(file.path, "rb") as source:
        fd = source.fileno()
        stage: Stage[_Job] = Stage(
            work=lambda job, n: file.look(job, n, fd, entropy),
            place=lambda job: None,
            finish=lambda job: counter.add(job.read),
        )
        run_jobs(jobs, stage, threads=threads, budget=memory_budget(largest))


def _totals(result: Inspection) -> None:
    chosen = [t for t in result.tensors if (t.layout != _STORED if result.packed else t.estimate is not None)]
    sizes = [t.original_bytes // 2 for t in chosen]
    result.weights = sum(sizes)
    if not chosen:
        return
    result.bits_per_weight = 8 * sum(t.stored_bytes for t in chosen) / result.weights
    if all(t.floor is not None for t in chosen):
        result.floor = sum(n * (t.floor or 0) for n, t in zip(sizes, chosen, strict=True)) / result.weights
    if not result.packed:
        saved = sum(n * (16 - (t.estimate or 16)) / 8 for n, t in zip(sizes, chosen, strict=True))
        result.estimated_bytes = round(result.original_bytes - saved)
