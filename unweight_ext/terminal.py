"""What people see: progress bars, tables, sizes."""

import io
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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

    # Printed by print() and not by rich, which exits by itself when a pipe is closed.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    console = Console(file=io.StringIO(), markup=False, highlight=False, width=width)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
