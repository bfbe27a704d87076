"""Packed checkpoints made by somebody who can compute checksums, and memory that runs out."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import bf16, other, packed_sharded_model, problems_of, write_safetensors

from unweight_ext.checkpoint import (
    CheckpointError,
    DamagedError,
    compress_checkpoint,
    decompress_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from unweight_ext.checkpoint.codec import operator_errors
from unweight_ext.checkpoint.container import CHECK_KEY, NO_DIGEST, digest, zip_text


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory) -> tuple[Path, Path]:
    """A folder and its packed form; tests copy them before they change anything."""
    return packed_sharded_model(tmp_path_factory.mktemp("forged"))


def forge(packed: Path, change) -> None:
    """Rewrites a packed file's header and gives it a right check, as an attacker could."""
    data = packed.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    header["__metadata__"][CHECK_KEY] = NO_DIGEST
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.replace(NO_DIGEST.encode(), digest(text).encode(), 1)
    packed.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _metadata(key: str, value: str | None):
    def change(header: dict) -> None:
        if value is None:
            del header["__metadata__"][key]
        else:
            header["__metadata__"][key] = value

    return change


def _rename(header: dict) -> None:
    header["other.weight_packed"] = header.pop("a.weight_packed")


def _retype(header: dict) -> None:
    header["b"]["dtype"] = "I8"


def _reshape(header: dict) -> None:
    n, row_bytes = header["a.weight_packed"]["shape"]
    header["a.weight_packed"]["shape"] = [n // 2, row_bytes * 2]


def _empty(header: dict) -> None:
    """A packed matrix without bytes; the data of the other tensor moves to where they were."""
    a, b = header["a.weight_packed"], header["b"]
    size = a["data_offsets"][1] - a["data_offsets"][0]
    a |= {"shape": [64, 0], "data_offsets": [0, 0]}
    b |= {"data_offsets": [0, size + 4], "shape": [size + 4]}


def _huge(columns: int):
    """An original larger than any file."""

    def change(header: dict) -> None:
        size = 2 * 64 * columns
        a = {"dtype": "BF16", "shape": [64, columns], "data_offsets": [0, size]}
        b = {"dtype": "U8", "shape": [4], "data_offsets": [size, size + 4]}
        header["__metadata__"]["unweight.header"] = zip_text(json.dumps({"a.weight": a, "b": b}).encode())

    return change


FORGED = {
    f"can't hold BF16 [64, {1 << 55}]": _huge(1 << 55),
    "its unweight.header): tensor 'a.weight': data_offsets [0, 9223372036854775808]": _huge(1 << 56),
    "U8 [64, 0] can't hold BF16 [64, 256]": _empty,
    "unweight.digests isn't hexadecimal": _metadata("unweight.digests", " " * 64),
    "unweight.format '1', this version reads '0'": _metadata("unweight.format", "1"),
    "no 'unweight.header'": _metadata("unweight.header", None),
    "no 'unweight.digests'": _metadata("unweight.digests", None),
    "the metadata is damaged": _metadata("unweight.header", "AAAA"),
    "doesn't fit the original header": _metadata("unweight.digests", "00"),
    "tensor 'a.weight_packed' isn't one of the original": _metadata("unweight.names", '{"a.weight_packed": ["x"]}'),
    "is one of": _metadata("unweight.names", '{"a.weight_packed": "b"}'),
    "tensor 'other.weight_packed' isn't one of the original": _rename,
    "tensor 'b': I8 [4], expected U8 [4]": _retype,
    "can't hold BF16 [64, 256]": _reshape,
    "its hash is": _metadata("unweight.digests", "0" * 64),
}


@pytest.mark.parametrize("message", FORGED)
def test_forged_headers(tmp_path, message):
    source, packed = tmp_path / "x.safetensors", tmp_path / "packed.safetensors"
    write_safetensors(source, {"a.weight": bf16("trained", 64, 256), "b": other("U8", 4)})
    compress_checkpoint(source, packed)
    forge(packed, lambda header: None)
    assert verify_checkpoint(packed, against=source).ok
    forge(packed, FORGED[message])
    problems = problems_of(packed)
    assert problems and (message in problems[0] or message == "is one of")
    with pytest.raises(CheckpointError if "this version reads" in message else DamagedError):
        decompress_checkpoint(packed, tmp_path / "back.safetensors")
    if message != "its hash is":
        with pytest.raises(CheckpointError):
            inspect_checkpoint(packed)


def test_a_manifest_cannot_write_elsewhere(packed_folder, tmp_path):
    _, packed = packed_folder
    for name in ("../evil", "/tmp/evil", "a/../../evil", ".", "a//b", "a\0b", "config.json", "tokenizer.json/a"):

        def folder(manifest: dict, name: str = name) -> None:
            manifest["folders"] = [name]

        def file(manifest: dict, name: str = name) -> None:
            manifest["files"][name] = manifest["files"].pop("desktop.ini")

        for change in (folder, file)[: 1 if name == "config.json" else 2]:
            copy = tmp_path / "copy"
            shutil.copytree(packed, copy)
            forge_manifest(copy, change)
            with pytest.raises(DamagedError, match="the path"):
                decompress_checkpoint(copy, tmp_path / "back")
            shutil.rmtree(copy)


BOMB = zip_text(bytes(200_000_000))  # 200 kB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["config.json"].update(size=-1, original=BOMB), "size -1"),
        (
            lambda f: f["config.json"].update(size=10**12, original=BOMB),
            "an edited file of 1000000000000 bytes, allowed are",
        ),
        (lambda f: f["config.json"].update(size=9, original=BOMB), "the compressed text is incomplete or too long"),
        (lambda f: f["config.json"].update(stored_xxh3_128=" " * 32), "the digest"),
        (lambda f: f["tokenizer.json"].update(xxh3_128="A" * 32), "the digest"),
        (lambda f: f["tokenizer.json"].update(xxh3_128="0" * 32 + "\n"), "the digest"),
    ],
)
def test_forged_manifests(packed_folder, tmp_path, change, message):
    copy = tmp_path / "copy"
    shutil.copytree(packed_folder[1], copy)

    def forged(manifest: dict) -> None:
        change(manifest["files"])

    forge_manifest(copy, forged)
    with pytest.raises(DamagedError, match=message):
        decompress_checkpoint(copy, tmp_path / "back")


def test_no_memory_is_no_damage():
    """What the operators say when an allocation fails, and when it is something else that nobody thought of."""
    no_memory = 'torch_call_dispatcher("aten::new_empty", "", stack.data(), 0) API call failed at line 100'
    with pytest.raises(MemoryError, match="model: tensor 'a'"):
        with operator_errors("model: tensor 'a'"):
            raise RuntimeError(no_memory)
    with pytest.raises(RuntimeError, match="^something else$"):
        with operator_errors("model: tensor 'a'"):
            raise RuntimeError("something else")
    with pytest.raises(DamagedError, match="^model: tensor 'a': packed: not"):
        with operator_errors("model: tensor 'a'"):
            torch.ops.unweight.unpack(torch.zeros(64, 100, dtype=torch.uint8), 64, torch.bfloat16)


def test_running_out_of_memory_while_unpacking(tmp_path):
    """A real limit on the address space, below what the tensor takes."""
    source, packed = tmp_path / "x.safetensors", tmp_path / "packed.safetensors"
    write_safetensors(source, {"a.weight": ("BF16", (1 << 14, 1 << 13), bytes(2 << 27))})
    compress_checkpoint(source, packed)
    code = (
        "import resource, sys, unweight_ext.checkpoint as c; from unweight_ext.cli import main;"
        "import unweight_ext.checkpoint.unpack_file as u; from pathlib import Path;"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (200 << 20);"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size)); sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "verify", packed, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "out of memory" in done.stderr, done


def forge_manifest(folder: Path, change) -> None:
    """Rewrites a manifest and gives it a right check."""
    path = folder / "unweight.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    manifest[CHECK_KEY] = NO_DIGEST
    text = json.dumps(manifest).encode()
    path.write_bytes(text.replace(NO_DIGEST.encode(), digest(text).encode(), 1))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "BF16", "shape": [2**63 - 1] * 100_000, "data_offsets": [0, 2]}},
        {"a": {"dtype": "BF16", "shape": [2**63] * 20, "data_offsets": [0, 2]}},
    ],
    ids=["many dimensions", "large dimensions"],
)
def test_hostile_shapes_are_refused_at_once(tmp_path, header):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"ab")
    with pytest.raises(CheckpointError, match="more than 2"):
        inspect_checkpoint(path)


def test_many_names_with_a_repeated_one_are_refused_at_once(tmp_path):
    entry = '{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"n{i}":{entry}' for i in [*range(60_000), 59_999]) + "}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(CheckpointError, match="'n59999' is there twice"):
        inspect_checkpoint(path)
