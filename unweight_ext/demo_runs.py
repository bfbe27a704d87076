"""The demo's forward passes: the BF16 original, then the same weights packed."""

import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint.codec import DISK_LAYOUT, is_packable
from .checkpoint.safetensors_io import read_header
from .convert import compress_model
from .nn import Linear
from .ops import linear as _linear
from .packed import pack_quietly

LAYOUTS = ("huffman", "nibble")  # those for memory
_REPEATS = 7
_SMALL = 2 << 30  # bytes of BF16 up to which several copies of a model are held, one of them in fp32
_LAYERS_LIMIT = 1 << 30  # bytes of layers that run one by one
_LAYER_ROWS = (1, 16)

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates were raised by the central bank on Tuesday.",
    "The bank increased its key rate to slow inflation.",
    "She plays the violin in the city's youth orchestra.",
    "He has practised the cello every day since he was six.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "Plants make their own food from sunlight.",
    "The train to Hamburg leaves from platform nine.",
    "Our flight to Lisbon was delayed by two hours.",
    "Lossless compression gives every bit of the original back.",
    "A zip archive restores files exactly as they were.",
)


@dataclass
class Row:
    """One line of the table. Compared with the BF16 original; None where it doesn't apply."""

    weights: str
    bytes: int  # of the whole model, or of the layers that ran
    share: float  # of the BF16 original's bytes
    bits_per_weight: float | None = None  # of what is packed
    identical: bool | None = None  # exact mode
    max_difference: float | None = None  # fused mode, as everything below
    cosine: float | None = None  # the lowest of any sentence or layer
    nearest_kept: bool | None = None  # each sentence's nearest other sentence
    largest: float | None = None  # of the original's outputs, to judge the difference by
    error: float | None = None  # |y - y32| / |y32| against fp32
    ms_one: float | None = None
    ms_all: float | None = None


def relative_error(y: Tensor, reference: Tensor) -> float:
    """|y - reference| / |reference|."""
    reference = reference.double()
    return float((y.double() - reference).norm() / reference.norm())


def median_ms(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Median times of calls in milliseconds, taken in turns so that all see the same machine; two don't count."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_REPEATS + 2):
        for run, own in zip(runs, times, strict=True):
            begin = time.perf_counter()
            run()
            own.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(own[2:]) for own in times]


@dataclass
class _Outputs:
    hidden: Tensor  # (sentences, tokens, width), padding set to zero
    sentences: Tensor  # (sentences, width) float32, unit length

    @property
    def nearest(self) -> Tensor:
        similar = self.sentences @ self.sentences.T
        return similar.fill_diagonal_(-2).argmax(-1)


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> _Outputs:
    mask = batch["attention_mask"][..., None]  # (sentences, tokens, 1)
    # Zeros, not a product: NaN of a padding token must not reach the comparison.
    hidden = model(**batch)[0].masked_fill(mask == 0, 0)
    mean = hidden.float().sum(1) / mask.sum(1)
    return _Outputs(hidden, F.normalize(mean, dim=-1))


def _load(folder: Path) -> nn.Module:
    from transformers import AutoModel
    from transformers import __version__ as version

    key = "dtype" if tuple(map(int, version.split(".")[:2])) >= (4, 56) else "torch_dtype"
    return AutoModel.from_pretrained(folder, **{key: torch.bfloat16}, local_files_only=True).eval()


def _batches(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All sentences, and the first alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    names = ("input_ids", "attention_mask")
    both = (tokenizer(list(texts), padding=True, return_tensors="pt") for texts in (SENTENCES, SENTENCES[:1]))
    every, one = ({name: batch[name] for name in names} for batch in both)
    if every["input_ids"].unique().numel() < len(SENTENCES):  # transformers makes up a tokenizer where none is
        raise ValueError("there is no tokenizer that knows the demo's sentences")
    return every, one


@dataclass
class Original:
    """A transformers model that runs, and what it gives."""

    folder: Path
    model: nn.Module
    every: dict[str, Tensor]
    one: dict[str, Tensor]
    outputs: _Outputs


@torch.inference_mode()
def run_original(folder: Path) -> Original:
    """Runs the BF16 model once. Raises whatever transformers raises for a checkpoint that it can't run."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = _load(folder)
    every, one = _batches(folder)
    return Original(folder, model, every, one, _forward(model, every))


@torch.inference_mode()
def run_model(first: Original, say: Callable[[str], None]) -> list[Row]:
    """Runs the model on sentences: as it is, then packed in each layout."""
    model, every, one, original = first.model, first.every, first.one, first.outputs
    del first.model
    say(f"run         {type(model).__name__} on {len(SENTENCES)} sentences")
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    rows, models = [Row("bf16", size, 1.0, 16.0, largest=float(original.hidden.abs().max()))], [model]
    reference = None
    if size <= _SMALL:
        reference = _forward(deepcopy(model).float(), every)
        rows[0].error = relative_error(original.hidden, reference.hidden)
    for layout in LAYOUTS:
        if size > _SMALL:  # one at a time
            _time(rows[-1:], models, one, every)
            models.clear()
            del model
        model = _load(first.folder)
        rows.append(_packed_row(model, layout, every, original, reference))
        models.append(model)
    _time(rows[-len(models) :], models, one, every)
    return rows


def _time(rows: list[Row], models: list[nn.Module], *batches: dict[str, Tensor]) -> None:
    """Fills in how long the models take for one sentence and for all."""
    one, every = ([partial(model, **batch) for model in models] for batch in batches)
    for row, ms_one, ms_all in zip(rows, median_ms(one), median_ms(every), strict=True):
        row.ms_one, row.ms_all = ms_one, ms_all


def _packed_row(
    model: nn.Module, layout: str, every: dict[str, Tensor], original: _Outputs, reference: _Outputs | None
) -> Row:
    report = compress_model(model, layout, exact=True, progress=False)
    bits = 8 * sum(r.bytes_after for r in report.packed) / (sum(r.bytes_before for r in report.packed) / 2)
    exact = _forward(model, every)
    for module in model.modules():
        if isinstance(module, Linear):
            module.exact = False
    fused = _forward(model, every)
    return Row(
        weights=layout,
        bytes=report.model_bytes_after,
        share=report.model_bytes_after / report.model_bytes_before,
        bits_per_weight=bits,
        identical=torch.equal(exact.hidden, original.hidden),
        max_difference=float((fused.hidden.float() - original.hidden.float()).abs().max()),
        cosine=float((fused.sentences * original.sentences).sum(-1).min()),
        nearest_kept=torch.equal(fused.nearest, original.nearest),
        error=None if reference is None else relative_error(fused.hidden, reference.hidden),
    )


def _matrices(path: Path) -> list[tuple[str, Tensor]]:
    """BF16 matrices of a checkpoint in the order of the files, up to a limit."""
    from safetensors import safe_open

    found, left = [], _LAYERS_LIMIT
    for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
        with open(file, "rb") as opened:
            entries = read_header(file, opened.fileno()).in_file_order()
        with safe_open(file, "pt") as tensors:
            for e in entries:
                if is_packable(e, DISK_LAYOUT) and len(e.shape) == 2 and e.nbytes <= left:
                    found.append((e.name, tensors.get_tensor(e.name)))
                    left -= e.nbytes
    return found


@torch.inference_mode()
def run_layers(path: Path, say: Callable[[str], None]) -> list[Row]:
    """Multiplies the matrices of a checkpoint with random activations: as they are, then packed in each layout."""
    matrices = _matrices(path)
    random = torch.Generator().manual_seed(0)
    inputs = {
        k: torch.randn(max(_LAYER_ROWS), k, generator=random).bfloat16() for k in {w.shape[1] for _, w in matrices}
    }
    say(f"run         {len(matrices)} matrices, one by one")
    size = sum(w.nbytes for _, w in matrices)
    outputs = [F.linear(inputs[w.shape[1]], w) for _, w in matrices]
    references = [F.linear(inputs[w.shape[1]].float(), w.float()) for _, w in matrices]
    largest = max((float(y.abs().max()) for y in outputs), default=0.0)
    error = max((relative_error(y, r) for y, r in zip(outputs, references, strict=True)), default=0.0)
    rows = [Row("bf16", size, 1.0, 16.0, largest=largest, error=error)]
    runs: list[Callable[[int], Any]] = [lambda m: [F.linear(inputs[w.shape[1]][:m], w) for _, w in matrices]]
    for layout in LAYOUTS:
        layers = [(inputs[w.shape[1]], pack_quietly(w, layout)) for _, w in matrices]
        rows.append(_layers_row(layout, layers, size, outputs, references))
        runs.append(lambda m, layers=layers: [_linear(x[:m], p) for x, p in layers])
    one, many = (median_ms([partial(run, m) for run in runs]) for m in _LAYER_ROWS)
    for row, ms_one, ms_all in zip(rows, one, many, strict=True):
        row.ms_one, row.ms_all = ms_one, ms_all
    return rows


def _layers_row(
    layout: str, layers: list[tuple[Tensor, Tensor]], plain: int, outputs: list[Tensor], references: list[Tensor]
) -> Row:
    fused = [_linear(x, p) for x, p in layers]
    exact = [_linear(x, p, exact=True) for x, p in layers]
    size = sum(p.nbytes for _, p in layers)
    beside = list(zip(fused, outputs, strict=True))
    return Row(
        weights=layout,
        bytes=size,
        share=size / plain,
        bits_per_weight=16 * size / plain,
        identical=all(torch.equal(e, y) for e, y in zip(exact, outputs, strict=True)),
        max_difference=max(float((f.float() - y.float()).abs().max()) for f, y in beside),
        cosine=min(float(F.cosine_similarity(f.double(), y.double()).min()) for f, y in beside),
        error=max(relative_error(f, r) for f, r in zip(fused, references, strict=True)),
    )
