"""The arguments of `unweight tune`. Loaded for every command's help, so it loads next to nothing."""

from __future__ import annotations

import argparse

from .costs import TILED

DEFAULT_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint, packed or not: its shapes are measured")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="OUTxIN", help="a weight's shape; again for more"
    )
    parser.add_argument("--layout", action="append", choices=TILED, help="again for more (default: huffman and nibble)")
    tokens = f"rows of x; again for more (default: powers of two, {DEFAULT_TOKENS[0]} to {DEFAULT_TOKENS[-1]})"
    parser.add_argument("--tokens", action="append", type=int, metavar="M", help=tokens)
    parser.add_argument("--output", metavar="FILE", help="the table, extended if it is there (default: in the cache)")
    parser.add_argument(
        "--explain",
        nargs=3,
        type=int,
        metavar=("N", "K", "M"),
        help="measure nothing: say what the model expects of x [M, K] times a weight [N, K], and what limits it",
    )
    parser.add_argument("--gpu", choices=("H100", "H200"), default="H100", help="for --explain (default H100)")


ABOUT = """Tables are per
name of GPU and for the next power of two of rows, up to 16384. They count once a program calls
unweight_ext.load_tuned(); products of up to 64 rows give the same bits with every table."""
EXAMPLES = """\
examples:
  unweight tune Llama-3.1-8B-u                     the shapes of a checkpoint, on this GPU
  unweight tune --shape 14336x4096 --tokens 16     one product
  unweight tune --explain 14336 4096 16 --gpu H200 what the model expects, without a GPU
"""
