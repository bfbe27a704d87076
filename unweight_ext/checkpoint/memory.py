"""How much memory jobs may hold, and giving back what the allocator keeps."""

import ctypes
import os
import threading
from collections.abc import Callable

MARGIN = 64 << 20  # what may be held beside three times the largest tensor
_KEPT = 16 << 20  # of it, for what the allocator keeps
_SLACK = 12 << 20  # of it, for code pages, stacks and lists of tensors
JOB_SCRATCH = 5 << 20  # of a job, whatever its size: the codec's buffers and tables
THREAD_SCRATCH = 4 << 20  # of it, what stays as long as the thread

_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_budget(largest: int) -> int:
    """Bytes that jobs may hold together, for a largest tensor of `largest` bytes."""
    return 3 * largest + MARGIN - _KEPT - _SLACK


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, if this is glibc on Linux."""
    if not os.path.exists(_STATM):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class Resident:
    """Keeps resident memory within a budget, as far as that is the allocator's doing.

    glibc keeps freed memory for each thread, up to tens of MB. Reusing it is much cheaper than new pages, so it is
    given back only when the next job might not fit beside it.
    """

    def __init__(self, budget: int) -> None:
        self._trim = _find_trim()
        self._lock = threading.Lock()
        if self._trim is not None:
            self._statm = open(_STATM, "rb", buffering=0)
            self._trim(0)  # what an earlier run left is not part of the base
            self._limit = self._resident() + budget + _KEPT

    def close(self) -> None:
        if self._trim is not None:
            self._statm.close()

    def _resident(self) -> int:
        return int(os.pread(self._statm.fileno(), 100, 0).split()[1]) * _PAGE

    def make_room(self, size: int) -> None:
        """Called before `size` more bytes are used, those counted that other jobs haven't used yet."""
        if self._trim is not None and self._resident() + size > self._limit:
            with self._lock:
                self._trim(0)
