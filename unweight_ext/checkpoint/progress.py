"""Counts bytes for a progress bar."""

import threading
from collections.abc import Callable

ProgressCallback = Callable[[int, int, str], None]  # bytes done, bytes in all, the file at work


class Progress:
    """Adds up what all threads have done and tells a callback."""

    def __init__(self, callback: ProgressCallback | None, total: int) -> None:
        self._callback, self._total = callback, total
        self._done, self._what = 0, ""
        self._lock = threading.Lock()

    def start(self, what: str) -> None:
        self._what = what
        self.add(0)

    def add(self, size: int) -> None:
        if self._callback is None:
            return
        with self._lock:
            self._done += size
            self._callback(self._done, self._total, self._what)
