"""How the command `unweight` ends: exit codes, what is said about errors, interruptions."""

import errno
import json
import os
import signal
import tempfile
import threading
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from .terminal import OutputError, print_error, print_out, printable

OK, DIFFERS, UNUSABLE, INTERNAL, INTERRUPTED = 0, 1, 2, 70, 130

EXIT_CODES = """\
exit codes:
  0    done
  1    stored bytes are damaged, or differ from what they are compared with
  2    wrong usage, or a file, folder, checkpoint or GPU that can't be used
  70   a mistake in this program: its traceback is worth a report
  130  interrupted (Ctrl-C, SIGTERM or SIGHUP); no output was left behind, but what --resume keeps
"""


def failed(message: str, as_json: bool, code: int) -> int:
    """Says in one line what is wrong. Returns the exit code."""
    print_error(f"unweight: error: {printable(message)}")
    if as_json:
        try:
            print_out(json.dumps({"error": message, "exit_code": code}))
        except OutputError as error:
            print_error(f"unweight: error: {error}")
    return code


def exit_code_of(error: BaseException, args: Namespace) -> int:
    """Says what went wrong in a command. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        kept = "; the same command goes on from here" if getattr(args, "resume", False) else ""
        return failed(f"interrupted{kept}", args.json, INTERRUPTED)
    if isinstance(error, OutputError):
        return failed(str(error), False, UNUSABLE)
    if isinstance(error, OSError):
        return failed(_os_error(error, args), args.json, UNUSABLE)
    if isinstance(error, MemoryError):
        return failed(f"out of memory {error}".strip(), args.json, UNUSABLE)
    if isinstance(error, ImportError):
        return failed(str(error), args.json, UNUSABLE)
    if isinstance(error, ValueError):
        from .checkpoint import CheckpointError, DamagedError

        if isinstance(error, CheckpointError):
            return failed(str(error), args.json, DIFFERS if isinstance(error, DamagedError) else UNUSABLE)
    print_error("".join(traceback.format_exception(error)).rstrip())  # Python's own exit code for it would be 1
    return failed(f"{type(error).__name__}: {error}", args.json, INTERNAL)


def _os_error(error: OSError, args: Namespace) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kept = "finished files are kept for --resume" if getattr(args, "resume", False) else "nothing was left behind"
        return f"{getattr(args, 'target', tempfile.gettempdir())}: no space left on its disk; {kept}"
    if error.errno is None:
        return str(error)
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    return f"{where}{error.strerror}"


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP are like Ctrl-C; only the first counts: nothing may interrupt cleaning up and leaving."""

    def interrupt(*_: object) -> NoReturn:
        for number in old:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    old: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                old[number] = signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        restore()
        raise
    restore()
