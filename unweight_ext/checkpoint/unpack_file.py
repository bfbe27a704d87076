"""Makes the original of one packed safetensors file again, or only checks that it could."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from .codec import UNPACK_COST, bytes_of, unpack_bytes
from .container import PackedFile, Stored, digest, is_packed, parse_packed
from .errors import CheckpointError, DamagedError, at
from .memory import memory_budget
from .pipeline import Stage, run_jobs
from .progress import Progress
from .safetensors_io import PIECE_BYTES, Header, read_header, reading, write_all


def read_packed_header(path: Path) -> PackedFile:
    """Raises CheckpointError if the file isn't a packed one, DamagedError if it isn't what was written."""
    with open(path, "rb") as file:
        header = read_header(path, file.fileno())
    if not is_packed(header):
        raise CheckpointError(at(path, "not packed: an ordinary safetensors file"))
    return parse_packed(path, header)


@dataclass
class _Unpack:
    tensor: Stored
    weight: Tensor | None = None  # the original bytes

    @property
    def nbytes(self) -> int:
        return self.tensor.original.nbytes

    @property
    def cost(self) -> int:
        return int(UNPACK_COST * self.nbytes) if self.tensor.packed else min(self.nbytes, PIECE_BYTES)

    @property
    def kept(self) -> int:
        return 0 if self.weight is None else self.weight.numel()


class FileUnpacker:
    """Decodes the tensors of a packed file one by one and compares their hashes."""

    def __init__(self, path: Path, file: PackedFile, progress: Progress) -> None:
        self.path, self.file, self.progress = path, file, progress
        self._out: int | None = None
        self._against: int | None = None
        self.problems: list[str] = []

    def write(self, target: Path, *, threads: int, largest: int) -> None:
        """Writes the original file. Raises DamagedError at the first tensor that isn't what it was."""
        with open(target, "xb") as out:
            self._out = out.fileno()
            os.ftruncate(self._out, self.file.original.file_bytes)
            write_all(self._out, self.file.original.prefix, 0)
            self._run(self._raise, threads, largest)
            with open(self.path, "rb") as source:
                os.fchmod(self._out, os.fstat(source.fileno()).st_mode & 0o777)

    def check(self, against: Path | None, *, threads: int, largest: int) -> list[str]:
        """Decodes everything in memory. `against` is the original file, to compare with. Returns what is wrong."""
        with ExitStack() as stack:
            if against is not None:
                original = stack.enter_context(open(against, "rb"))
                if not self._same_header(against, read_header(against, original.fileno())):
                    return self.problems
                self._against, self._against_path = original.fileno(), against
            self._run(self.problems.append, threads, largest)
        return sorted(self.problems)

    @staticmethod
    def _raise(problem: str) -> None:
        raise DamagedError(problem)

    def _same_header(self, path: Path, header: Header) -> bool:
        if header.text != self.file.original.text:
            self.problems.append(at(path, f"its header isn't the one that {self.path} was made from"))
            return False
        return True

    def _run(self, report: Callable[[str], None], threads: int, largest: int) -> None:
        with open(self.path, "rb") as source:
            self._in, self._in_start = source.fileno(), self.file.header.data_start
            self._report = report
            stage: Stage[_Unpack] = Stage(self._work, lambda job: None, self._finish)
            jobs = [_Unpack(t) for t in self.file.tensors]
            run_jobs(jobs, stage, threads=threads, budget=memory_budget(largest))

    def _work(self, job: _Unpack, threads: int) -> None:
        tensor = job.tensor
        found = self._unpack(job, threads) if tensor.packed else self._copy(tensor)
        if found is not None and found != tensor.digest:
            self._report(self._named(tensor, f"its hash is {found}, expected {tensor.digest}"))
        if self._against is not None:
            found = self._hash_of(self._against_path, self._against, tensor)
            if found != tensor.digest:
                self._report(at(self._against_path, f"tensor {tensor.original.name!r} differs from what was packed"))

    def _named(self, tensor: Stored, what: str) -> str:
        return at(self.path, f"tensor {tensor.stored.name!r}: {what}")

    def _unpack(self, job: _Unpack, threads: int) -> str | None:
        stored = job.tensor.stored
        with reading(self.path, self._in, stored.nbytes, self._in_start + stored.start) as data:
            where = at(self.path, f"tensor {stored.name!r}")
            try:
                weight = unpack_bytes(data, stored, job.tensor.original, where, threads)
            except DamagedError as error:
                self._report(str(error))
                return None
        if self._out is not None:
            job.weight = weight
        return digest(bytes_of(weight))

    def _copy(self, tensor: Stored) -> str:
        whole = xxhash.xxh3_128()
        stored, original = tensor.stored, tensor.original
        for offset in range(0, stored.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, stored.nbytes - offset)
            with reading(self.path, self._in, size, self._in_start + stored.start + offset) as data:
                whole.update(data)
                if self._out is not None:
                    write_all(self._out, data, self.file.original.data_start + original.start + offset)
        return whole.hexdigest()

    def _hash_of(self, path: Path, fd: int, tensor: Stored) -> str:
        whole = xxhash.xxh3_128()
        start = self.file.original.data_start + tensor.original.start
        for offset in range(0, tensor.original.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, tensor.original.nbytes - offset)
            with reading(path, fd, size, start + offset) as data:
                whole.update(data)
        return whole.hexdigest()

    def _finish(self, job: _Unpack) -> None:
        if job.weight is not None:
            assert self._out is not None
            write_all(self._out, bytes_of(job.weight), self.file.original.data_start + job.tensor.original.start)
            job.weight = None
        self.progress.add(job.nbytes)
