"""Checkpoints that are broken, hostile or something else: a clear error, never wrong bytes."""

import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import bf16, other, sharded_model, tree, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

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

U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def raw_file(path: Path, header: object, data: bytes = b"abcd") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


BROKEN = {
    "empty": (b"", "0 bytes, expected a safetensors file of at least 8"),
    "short": (b"\x10\0\0", "3 bytes, expected a safetensors file of at least 8"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "truncated: 10 bytes, expected 1008"),
    "absurd header": (b"\xff" * 8 + b"{" * 56, "a header of 18446744073709551615 bytes, expected at most"),
    "a pickle": (b"PK\x03\x04" + b"\0" * 60, "the header starts with"),
    "a git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer"),
    "no JSON": (b"{oops", "the header isn't valid JSON"),
    "no text": (b"{\xff\xfe}", "the header isn't valid JSON"),
    "deep JSON": (b'{"a":' + b"[" * 100_000, "the header isn't valid JSON"),
    "a list": (b"[1, 2]", "the header starts with"),
    "a name twice": (b'{"a":1,"a":1}', "the name 'a' is there twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__: expected an object of strings"),
    "an entry of nothing": ({"a": None}, "tensor 'a': its entry is NoneType"),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, "tensor 'a': no 'dtype'"),
    "an unknown dtype": ({"a": U8 | {"dtype": "BF17"}}, "tensor 'a': dtype 'BF17', expected one of"),
    "a dtype of lists": ({"a": U8 | {"dtype": ["U8"]}}, "tensor 'a': dtype ['U8']"),
    "a negative shape": ({"a": U8 | {"shape": [-4]}}, "tensor 'a': shape [-4]"),
    "a shape of floats": ({"a": U8 | {"shape": [4.0]}}, "tensor 'a': shape [4.0]"),
    "a shape of truth": ({"a": U8 | {"shape": [True]}}, "tensor 'a': shape [True]"),
    "a huge shape": ({"a": U8 | {"shape": [2**62, 2**62]}}, "tensor 'a': data_offsets [0, 4] hold 4 bytes"),
    "one offset": ({"a": U8 | {"data_offsets": [4]}}, "tensor 'a': data_offsets [4], expected two numbers"),
    "offsets backwards": ({"a": U8 | {"data_offsets": [4, 0]}}, "expected the first not to be above the second"),
    "the wrong size": ({"a": U8 | {"shape": [3]}}, "tensor 'a': data_offsets [0, 4] hold 4 bytes, expected 3"),
    "half bytes": ({"a": {"dtype": "F4", "shape": [7], "data_offsets": [0, 4]}}, "expected 3.5 for F4 [7]"),
    "beyond the end": ({"a": U8 | {"shape": [9], "data_offsets": [0, 9]}}, "truncated:"),
    "bytes left over": ({"a": U8 | {"shape": [3], "data_offsets": [0, 3]}}, "too long:"),
    "half a surrogate pair in a name": (b'{"\\ud800a":1}', "the header has '\\ud800a', which UTF-8 has no form for"),
    "half a pair in metadata": (b'{"__metadata__":{"a":"\\udfff"}}', "the header has '\\udfff', which UTF-8"),
    "half a pair in a key": (b'{"__metadata__":{"\\udfff":"a"}}', "the header has '\\udfff', which UTF-8"),
    "an overlap": (
        {"a": U8 | {"shape": [3], "data_offsets": [0, 3]}, "b": U8 | {"shape": [2], "data_offsets": [2, 4]}},
        "tensor 'b' overlaps 'a': it starts at 2, expected 3",
    ),
    "a hole": (
        {"a": U8 | {"shape": [1], "data_offsets": [0, 1]}, "b": U8 | {"shape": [2], "data_offsets": [2, 4]}},
        "tensor 'b' leaves a hole after 'a': it starts at 2, expected 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_safetensors(tmp_path, name):
    content, expected = BROKEN[name]
    path = tmp_path / "model.safetensors"
    if isinstance(content, dict) or content[:1] in (b"{", b"["):
        raw_file(path, content)
    else:
        path.write_bytes(content)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(path, folder)
    for source, target in ((path, tmp_path / "out.safetensors"), (folder, tmp_path / "out")):
        for run in (compress_checkpoint, decompress_checkpoint):
            with pytest.raises(CheckpointError) as error:
                run(source, target)
            assert not target.exists()
            if run is compress_checkpoint or source is path:
                assert expected in str(error.value) and str(path.name) in str(error.value)
        with pytest.raises(CheckpointError):
            inspect_checkpoint(source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.safetensors"]


def test_paths_and_arguments(tmp_path):
    model = sharded_model(tmp_path / "model", shards=1)
    file = next(model.glob("*.safetensors"))
    packed = tmp_path / "packed"
    compress_checkpoint(model, packed)
    (tmp_path / "bare").mkdir()
    (tmp_path / "text.txt").write_text("x")
    cases = [
        (lambda: compress_checkpoint(tmp_path / "no", tmp_path / "x"), FileNotFoundError, "no: doesn't exist"),
        (lambda: decompress_checkpoint(tmp_path / "no", tmp_path / "x"), FileNotFoundError, "no: doesn't exist"),
        (lambda: verify_checkpoint(tmp_path / "no"), FileNotFoundError, "no: doesn't exist"),
        (lambda: verify_checkpoint(packed, against=tmp_path / "no"), FileNotFoundError, "no: doesn't exist"),
        (lambda: inspect_checkpoint(tmp_path / "no"), FileNotFoundError, "no: doesn't exist"),
        (lambda: compress_checkpoint(model, packed), FileExistsError, "exists already; --overwrite"),
        (lambda: compress_checkpoint(model, model), CheckpointError, "the output is the input"),
        (lambda: compress_checkpoint(model, model / "out"), CheckpointError, "the output lies inside the input"),
        (lambda: compress_checkpoint(model, tmp_path, overwrite=True), CheckpointError, "holds the input"),
        (lambda: compress_checkpoint(model, tmp_path / "a" / "b"), CheckpointError, "doesn't exist"),
        (lambda: compress_checkpoint(tmp_path / "bare", tmp_path / "x"), CheckpointError, "no .safetensors file"),
        (lambda: inspect_checkpoint(tmp_path / "bare"), CheckpointError, "no .safetensors file"),
        (lambda: compress_checkpoint(tmp_path / "text.txt", tmp_path / "x"), CheckpointError, "expected a folder or"),
        (
            lambda: compress_checkpoint(file, tmp_path / "x"),
            CheckpointError,
            "expected a name that ends in .safetensors",
        ),
        (lambda: compress_checkpoint(packed, tmp_path / "x"), CheckpointError, "already packed"),
        (
            lambda: compress_checkpoint(packed / file.name, tmp_path / "x.safetensors"),
            CheckpointError,
            "already packed",
        ),
        (lambda: decompress_checkpoint(model, tmp_path / "x"), CheckpointError, "not a packed checkpoint"),
        (lambda: decompress_checkpoint(file, tmp_path / "x.safetensors"), CheckpointError, "not packed"),
        (lambda: verify_checkpoint(model), CheckpointError, "not a packed checkpoint"),
        (lambda: verify_checkpoint(packed, against=file), CheckpointError, "expected a folder"),
        (lambda: compress_checkpoint(model, tmp_path / "x", layout="zip"), CheckpointError, "layout: 'zip', expected"),
        (lambda: compress_checkpoint(model, tmp_path / "x", threads=-1), CheckpointError, "threads: -1, expected 0"),
        (lambda: compress_checkpoint(file, tmp_path / "x.safetensors", resume=True), CheckpointError, "only a folder"),
    ]
    before = sorted(tmp_path.iterdir())
    for run, kind, message in cases:
        with pytest.raises(kind) as error:
            run()
        assert message in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["weight_map"].update(x="nothere.safetensors"), "names 'nothere.safetensors' for tensor 'x'"),
        (lambda i: i["weight_map"].update(x=next(iter(i["weight_map"].values()))), "holds tensor 'x', and it doesn't"),
    ],
)
def test_an_index_that_lies(tmp_path, change, message):
    model = sharded_model(tmp_path / "model")
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        compress_checkpoint(model, tmp_path / "out")
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        compress_checkpoint(model, tmp_path / "out")
    path.unlink()
    (model / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: list, expected an object"):
        compress_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_that_lead_nowhere(tmp_path):
    model = sharded_model(tmp_path / "model", shards=1)
    (model / "gone").symlink_to("nothere")
    with pytest.raises(CheckpointError, match="gone: a link to nothing: nothere"):
        compress_checkpoint(model, tmp_path / "out")
    (model / "gone").unlink()
    (model / "sub" / "up").symlink_to("..")
    with pytest.raises(CheckpointError, match="up: a link to a folder that it lies in"):
        compress_checkpoint(model, tmp_path / "out")


def test_reserved_metadata(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"a": other("U8", 4)}, metadata={"unweight.names": "{}"})
    with pytest.raises(CheckpointError, match=r"unweight\.names"):
        compress_checkpoint(tmp_path / "x.safetensors", tmp_path / "out.safetensors")


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory) -> tuple[Path, Path]:
    """A folder and its packed form; tests copy them before they change anything."""
    work = tmp_path_factory.mktemp("damage")
    model = sharded_model(work / "model", shards=2, n=64, k=128)
    compress_checkpoint(model, work / "packed")
    return model, work / "packed"


def problems_of(packed: Path, **options) -> list[str]:
    try:
        return verify_checkpoint(packed, **options).problems
    except CheckpointError as error:
        return [str(error)]


def test_what_verify_finds_in_a_folder(packed_folder, tmp_path):
    model, packed = packed_folder
    first, second = sorted(p.name for p in packed.glob("*.safetensors"))

    def flip(path: Path, at: int = -1) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    cases = {
        "tokenizer.json: isn't what compress wrote": lambda p: flip(p / "tokenizer.json"),
        "config.json: isn't what compress wrote": lambda p: flip(p / "config.json"),
        "index.json: isn't what compress wrote": lambda p: flip(p / "model.safetensors.index.json", 40),
        f"{first}: is missing": lambda p: (p / first).unlink(),
        f"{second}: truncated": lambda p: (p / second).write_bytes((p / second).read_bytes()[:-1]),
        f"{first}: is another packed file": lambda p: shutil.copy(p / second, p / first),
        f"{first}: not packed": lambda p: shutil.copy(model / first, p / first),
        "unweight.json: damaged": lambda p: flip(p / "unweight.json", 200),
    }
    for i, (message, change) in enumerate(cases.items()):
        copy = tmp_path / str(i)
        shutil.copytree(packed, copy)
        change(copy)
        assert any(message in p for p in problems_of(copy)), (message, problems_of(copy))
        if "config.json" in message or "index.json" in message:
            decompress_checkpoint(copy, tmp_path / f"back{i}")  # the original's bytes are kept elsewhere
            assert tree(tmp_path / f"back{i}") == tree(model)
        else:
            with pytest.raises(DamagedError):
                decompress_checkpoint(copy, tmp_path / f"back{i}")
            assert not (tmp_path / f"back{i}").exists()


def test_what_verify_finds_in_the_original(packed_folder, tmp_path):
    model, packed = packed_folder
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 64
    shard.write_bytes(data)
    (copy / "config.json").write_text("{}")
    (copy / "desktop.ini").unlink()
    (copy / "new.txt").write_text("x")
    problems = "\n".join(verify_checkpoint(packed, against=copy).problems)
    assert f"{shard}: tensor " in problems and "differs from what was packed" in problems
    for message in ("config.json: differs", "desktop.ini: is missing", "new.txt: isn't in"):
        assert message in problems
    assert verify_checkpoint(packed).ok


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


FORGED = {
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
    with pytest.raises(CheckpointError):
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


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory) -> tuple[bytes, bytes, Path]:
    """A small file, its packed form, and a folder to work in."""
    work = tmp_path_factory.mktemp("flips")
    tensors = {
        "a.weight": bf16("few outsiders", 70, 130),
        "b": other("F32", 5, 5),
        "c.weight": bf16("trained", 64, 64),
        "noise.weight": bf16("any bits", 16, 16),
        "d": bf16("trained", 9),
    }
    write_safetensors(work / "x.safetensors", tensors, metadata={"format": "pt"})
    compress_checkpoint(work / "x.safetensors", work / "packed.safetensors")
    return (work / "x.safetensors").read_bytes(), (work / "packed.safetensors").read_bytes(), work


def check_damaged(packed_file, damaged: bytes) -> None:
    """Either an error, or the very bytes of the original; and verify says the same as decompress."""
    original, _, work = packed_file
    path, back = work / "damaged.safetensors", work / "damaged-back.safetensors"
    path.write_bytes(damaged)
    back.unlink(missing_ok=True)
    problems = problems_of(path, threads=1)
    try:
        decompress_checkpoint(path, back, threads=1)
    except CheckpointError as error:
        assert problems and not back.exists() and str(path) in str(error)
    else:
        assert not problems and back.read_bytes() == original


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bits(packed_file, data):
    damaged = bytearray(packed_file[1])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    check_damaged(packed_file, bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_and_moved_bytes(packed_file, data):
    packed = packed_file[1]
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(packed))] * 2)))
    more = data.draw(st.binary(max_size=40))
    check_damaged(packed_file, data.draw(st.sampled_from([packed[:a], packed[:a] + more + packed[b:], packed + more])))


def test_every_bit_of_the_header_counts(packed_file):
    packed = packed_file[1]
    length = 8 + int.from_bytes(packed[:8], "little")
    rng = random.Random(0)
    for position in [*range(8), *rng.sample(range(8, length), 150)]:
        damaged = bytearray(packed)
        damaged[position] ^= 1 << rng.randrange(8)
        path = packed_file[2] / "bit.safetensors"
        path.write_bytes(damaged)
        assert problems_of(path, threads=1), f"byte {position}"
