"""What people see: progress bars, tables, sizes."""

import errno
import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class OutputError(Exception):
    """Standard output can't be written to."""


def prepare_streams() -> None:
    """Makes sure that anything can be printed: to streams that the caller closed (daemons do that), and as ASCII."""
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does from the start


def _print(text: str, stream: TextIO) -> OSError | None:
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # What is left in its buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def print_out(text: str) -> None:
    """Prints on standard output. Raises OutputError; that a pipe is closed (`unweight inspect … | head`) is none."""
    error = _print(text, sys.stdout)
    if error is not None and error.errno != errno.EPIPE:
        raise OutputError(f"standard output: {error.strerror}")


def print_error(text: str) -> None:
    """Prints on standard error, if that is possible."""
    _print(text, sys.stderr)


def printable(text: str, keep: str = "") -> str:
    """`text` with every character escaped that does something to a terminal, as names in files may hold any.

    Control and direction characters, and what UTF-8 has no form for; `keep` names exceptions.
    """
    return "".join(
        c if c in keep or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(c)[1:-1]
        for c in text
    )


@contextmanager
def progress_bar(verb: str, *, quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar with rate and remaining time on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{verb} {printable(what)}")

        yield tell


def size_text(size: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def rate_text(size: int, seconds: float) -> str:
    """Time and rate."""
    return f"{seconds:.1f} s, {size / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def table_text(table: Any) -> str:
    """A rich table as text, as wide as the terminal; into a pipe, as wide as it has to be."""
    from rich.console import Console

    # Printed by `print_out` and not by rich, which exits by itself when a pipe is closed.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    like_stdout = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)  # it chooses lines by the encoding
    console = Console(file=like_stdout, markup=False, highlight=False, width=width)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
