"""Sizes and rates of the codec beside zipnn, on real weights, per core.

    python bench/codec.py [--json] [--per-tensor] [CHECKPOINT]

Everything runs in one process on one pinned core, in turns, a round at a time; figures are medians of the rounds. Rates
are bytes of BF16 a second. zipnn (the peer for storage) gets the same tensors' bytes in one piece, as they are in a
file, or one by one with --per-tensor. All results are memory as the allocator of the process gives it; where that is
new, the kernel's clearing of pages is a good part of the time, for small results less often than for one large one.
`compress` is the whole command on all cores, from and to files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import weights
import zipnn
from machine import machine
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import unweight_ext
from unweight_ext import checkpoint

LAYOUTS = ("archive", "huffman", "nibble")


def unpack(packed: torch.Tensor, in_features: int) -> None:
    torch.ops.unweight.unpack(packed, in_features, torch.bfloat16)


def timed(run: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def codec_rounds(tensors: list[torch.Tensor], rounds: int, per_tensor: bool) -> dict[str, dict[str, float]]:
    """Medians of GB/s for pack and unpack of zipnn and each layout, on this core."""
    pieces = [t.view(torch.uint8).numpy().tobytes() for t in tensors]
    if not per_tensor:
        pieces = [b"".join(pieces)]
    total = sum(map(len, pieces))
    peer = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    seconds: dict[tuple[str, str], list[float]] = {}

    def note(name: str, step: str, spent: float) -> None:
        seconds.setdefault((name, step), []).append(spent)

    for turn in range(rounds + 1):
        copies = [bytes(bytearray(p)) for p in pieces]  # zipnn turns its input's bits in place
        spent, compressed = timed(lambda c=copies: [peer.compress(p) for p in c])
        del copies
        back, decompressed = timed(lambda c=compressed: [peer.decompress(p) for p in c])
        assert decompressed == pieces, "zipnn doesn't round-trip"
        peer_size = sum(map(len, compressed))
        del decompressed
        if turn:  # the first round warms up
            note("zipnn", "pack", spent)
            note("zipnn", "unpack", back)
        for layout in LAYOUTS:
            spent, packed = timed(lambda name=layout: [unweight_ext.pack(t, name, threads=1) for t in tensors])
            columns = [unweight_ext.info(p).in_features for p in packed]
            back, _ = timed(lambda p=packed, c=columns: [unpack(x, k) for x, k in zip(p, c, strict=True)])
            if turn:
                note(layout, "pack", spent)
                note(layout, "unpack", back)
            else:
                same = all(
                    torch.equal(unweight_ext.unpack(p).view(torch.int16), t.view(torch.int16))
                    for p, t in zip(packed, tensors, strict=True)
                )
                assert same, f"{layout} doesn't round-trip"
            del packed
    rates: dict[str, dict[str, float]] = {"zipnn": {"size": peer_size / total}}
    for (name, step), spent in seconds.items():
        rates.setdefault(name, {})[step] = total / statistics.median(spent) / 1e9
    return rates


def file_size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*.safetensors"))


def compress_rounds(source: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Size of the whole checkpoint's safetensors against the original's, and GB/s of the command on all cores."""
    results = {}
    for layout in LAYOUTS:
        spent = []
        for turn in range(rounds + 1):
            with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
                out = Path(scratch) / "out"
                seconds, _ = timed(
                    # Without the disk, which would be measured otherwise.
                    lambda o=out, name=layout: checkpoint.compress_checkpoint(source, o, layout=name, sync=False)
                )
                size = file_size(out)
                shutil.rmtree(out)
            if turn:
                spent.append(seconds)
        results[layout] = {"size": size / file_size(source), "rate": file_size(source) / statistics.median(spent) / 1e9}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="a BF16 checkpoint folder (default: all-mpnet-base-v2)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--per-tensor", action="store_true", help="zipnn gets the tensors one by one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    source = options.checkpoint or weights.mpnet()

    cores = os.sched_getaffinity(0)
    command = compress_rounds(source, options.rounds)
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    tensors = [
        t
        for f in sorted(source.rglob("*.safetensors"))
        for t in load_file(f).values()
        if t.dtype == torch.bfloat16 and t.ndim >= 2
    ]
    rates = codec_rounds(tensors, options.rounds, options.per_tensor)
    os.sched_setaffinity(0, cores)

    report = {
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "checkpoint": source.name,
        "compress_threads": len(cores),
        "rates_per_core": rates,
        "compress": command,
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(machine())
    table = Table(title=f"{source.name}: {file_size(source) / 1e6:.0f} MB of safetensors")
    for column in (
        "",
        "size",
        "pack GB/s",
        "x zipnn",
        "unpack GB/s",
        "x zipnn",
        f"compress GB/s, {len(cores)} cores",
        "x one core's pack",
    ):
        table.add_column(column, justify="right" if column else "left")
    peer = rates["zipnn"]
    table.add_row("zipnn", f"{peer['size']:.2%}", f"{peer['pack']:.2f}", "1", f"{peer['unpack']:.2f}", "1", "", "")
    for layout in LAYOUTS:
        r, c = rates[layout], command[layout]
        table.add_row(
            layout,
            f"{c['size']:.2%}",
            f"{r['pack']:.2f}",
            f"{r['pack'] / peer['pack']:.1f}",
            f"{r['unpack']:.2f}",
            f"{r['unpack'] / peer['unpack']:.1f}",
            f"{c['rate']:.2f}",
            f"{c['rate'] / r['pack']:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
