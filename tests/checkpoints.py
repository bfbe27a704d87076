"""Checkpoints for tests, made byte by byte where the safetensors library would only make ordinary ones."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import samples
import torch
from safetensors.torch import save_file
from torch import Tensor

from unweight_ext.checkpoint import CheckpointError, compress_checkpoint, verify_checkpoint
from unweight_ext.checkpoint.safetensors_io import DTYPE_BITS

Raw = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def bf16(content: str, *shape: int, seed: int = 0) -> Raw:
    """A BF16 tensor with one of the contents of samples.py."""
    rows = shape[0] if shape else 1
    columns = int(np.prod(shape[1:]))
    return "BF16", shape, samples.bits(content, rows, columns, seed).tobytes()


def other(dtype: str, *shape: int, seed: int = 0) -> Raw:
    """A tensor of any dtype with arbitrary bytes."""
    size = int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
    return dtype, shape, np.random.default_rng(seed).bytes(size)


def header_of(tensors: dict[str, Raw], order: Iterable[str] | None = None) -> dict[str, Any]:
    """The entries of a header, in the order of `tensors`, with data in `order`."""
    offsets, position = {}, 0
    for name in order or tensors:
        size = len(tensors[name][2])
        offsets[name] = [position, position + size]
        position += size
    return {n: {"dtype": d, "shape": list(s), "data_offsets": offsets[n]} for n, (d, s, _) in tensors.items()}


def write_safetensors(
    path: Path,
    tensors: dict[str, Raw],
    *,
    metadata: dict[str, str] | None = None,
    order: list[str] | None = None,
    separators: tuple[str, str] = (",", ":"),
    padding: bytes = b"",
) -> None:
    """A file whose header and data may have any legal order."""
    header = {} if metadata is None else {"__metadata__": metadata}
    text = json.dumps(header | header_of(tensors, order), separators=separators, ensure_ascii=False).encode() + padding
    data = b"".join(tensors[name][2] for name in order or tensors)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def weights(layers: int, n: int, k: int, first: int = 0) -> dict[str, Tensor]:
    """A part of a model: matrices, biases, norms."""
    result = {}
    for i in range(first, first + layers):
        result[f"model.layers.{i}.proj.weight"] = samples.weight("trained", n, k, i)
        result[f"model.layers.{i}.proj.bias"] = samples.weight("trained", 1, n, i)[0].clone()
        result[f"model.layers.{i}.norm.weight"] = torch.ones(n, dtype=torch.float32)
    return result


def sharded_model(folder: Path, shards: int = 3, n: int = 128, k: int = 256) -> Path:
    """A Hugging Face folder: shards, an index, config and tokenizer files, a subfolder, an empty folder, a link."""
    folder.mkdir()
    weight_map, total = {}, 0
    for s in range(shards):
        name = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        tensors = weights(2, n, k, first=2 * s)
        if s == 0:
            tensors["model.embed_tokens.weight"] = samples.weight("trained", 333, 64, 77)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total, "note": "ü"}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    (folder / "config.json").write_text('{ "model_type":"llama",\t"rope": 1e4, "name": "ü" }\n\n', "utf-8")
    (folder / "tokenizer.json").write_bytes(bytes(range(256)) * 99)
    (folder / "desktop.ini").write_bytes(b"[x]\r\n")
    (folder / ".gitattributes").write_bytes(b"*.safetensors filter=lfs\n")
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "note.txt").write_bytes(b"")
    (folder / "empty").mkdir()
    real = folder.parent / f"{folder.name}-elsewhere"
    real.write_bytes(b"linked")
    (folder / "linked.bin").symlink_to(real)
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes; None for a folder."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))
    }


def packed_sharded_model(work: Path) -> tuple[Path, Path]:
    """A small sharded folder and its packed form."""
    model = sharded_model(work / "model", shards=2, n=64, k=128)
    compress_checkpoint(model, work / "packed")
    return model, work / "packed"


def problems_of(packed: Path, **options: Any) -> list[str]:
    """What is wrong with a packed checkpoint, even if it can't be read at all."""
    try:
        return verify_checkpoint(packed, **options).problems
    except CheckpointError as error:
        return [str(error)]
