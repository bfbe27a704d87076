"""The command `unweight tune`."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..exit_codes import OK, UNUSABLE, failed
from ..terminal import print_error, print_out, printable
from .arguments import DEFAULT_TOKENS

if TYPE_CHECKING:
    from .measure import Case
    from .table import Entry

DEFAULT_LAYOUTS = ("huffman", "nibble")
LEAST_FEATURES = 256  # of a checkpoint's weights: smaller products are all launch


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        return _explain(args) if args.explain else _measure(args)
    except ValueError as error:
        return failed(str(error), args.json, UNUSABLE)


def _explain(args: argparse.Namespace) -> int:
    from .explain import explain

    n, k, m = args.explain
    found = explain(n, k, m, (args.layout or ["huffman"])[0], args.gpu)
    if args.json:
        print_out(json.dumps(found.for_json()))
    elif not args.quiet:
        print_out(found.text())
    return OK


def parse_shape(text: str) -> tuple[int, int]:
    """Of "14336x4096", (out_features, in_features). Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"--shape {text}: expected OUTxIN, as in 14336x4096")
    return int(match[1]), int(match[2])


def shapes_of_checkpoint(path: str) -> list[tuple[int, int]]:
    """(out_features, in_features) of its linear layers' weights, each once. Raises CheckpointError, OSError."""
    from ..checkpoint import inspect_checkpoint

    shapes = {}
    for tensor in inspect_checkpoint(path, entropy=False).tensors:
        if tensor.dtype == "BF16" and len(tensor.shape) == 2 and min(tensor.shape) >= LEAST_FEATURES:
            if "embed" not in tensor.name:
                shapes[tensor.shape[0], tensor.shape[1]] = None
    return list(shapes)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What the arguments ask for. Raises ValueError, CheckpointError, OSError."""
    from .choices import bucket_of
    from .measure import Case

    shapes = [parse_shape(text) for text in args.shape]
    if args.path:
        shapes += shapes_of_checkpoint(args.path)
    if not shapes:
        raise ValueError("nothing to measure: give a checkpoint with BF16 weights, or --shape OUTxIN")
    for tokens in args.tokens or ():
        if tokens < 1:
            raise ValueError(f"--tokens {tokens}: expected at least 1")
    buckets = sorted({bucket_of(tokens) for tokens in args.tokens or DEFAULT_TOKENS})
    layouts = args.layout or DEFAULT_LAYOUTS
    return [Case(layout, n, k, m) for n, k in dict.fromkeys(shapes) for layout in layouts for m in buckets]


def _measure(args: argparse.Namespace) -> int:
    import torch

    from .. import ops
    from .measure import measure
    from .table import Table, default_path, merged, read, save

    cases = cases_of(args)
    if not torch.cuda.is_available():
        return failed(f"no GPU here that torch {torch.__version__} can use; --explain needs none", args.json, UNUSABLE)
    device = torch.device("cuda", torch.cuda.current_device())
    if problem := ops.fused_problem(device):
        return failed(problem, args.json, UNUSABLE)
    gpu = torch.cuda.get_device_name(device)
    path = Path(args.output) if args.output else default_path(gpu)
    old = read(path) if path.exists() else Table(gpu, ())
    if old.gpu != gpu:
        raise ValueError(f"{path}: a table of {old.gpu}, expected one of {gpu}")

    def tell(case: Case, entry: Entry) -> None:
        if not args.quiet:
            print_error(f"{case}: {_outcome(entry)}")

    entries = measure(cases, device, tell)
    about = f"{datetime.date.today()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    save(Table(gpu, merged(old.entries, entries), about), path)
    if args.json:
        print_out(json.dumps({"gpu": gpu, "path": str(path), "entries": [asdict(e) for e in entries]}))
    elif not args.quiet:
        print_out(printable(f"{path}: {len(entries)} measured; unweight_ext.load_tuned() makes products follow it"))
    return OK


def _outcome(entry: Entry) -> str:
    way = f"{entry.config} tokens" if entry.config else "scratch"
    gain = entry.default_microseconds / entry.microseconds
    return f"{way}, {entry.microseconds:.1f} µs" + (f" ({gain:.2f} × the usual way)" if gain > 1 else "")
