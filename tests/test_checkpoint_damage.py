"""Checkpoints that are broken, hostile or something else: a clear error, never wrong bytes."""

import json
import random
import shutil
import struct
from pathlib import Path

import pytest
from checkpoints import bf16, other, packed_sharded_model, problems_of, sharded_model, tree, write_safetensors
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
    (model / "sub" / "up").unlink()
    (model / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links.*model/round"):
        compress_checkpoint(model, tmp_path / "out")
    (model / "round").rename(tmp_path / "out")
    with pytest.raises(FileExistsError, match="out: exists already"):
        compress_checkpoint(model, tmp_path / "out")


def test_reserved_metadata(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"a": other("U8", 4)}, metadata={"unweight.names": "{}"})
    with pytest.raises(CheckpointError, match=r"unweight\.names"):
        compress_checkpoint(tmp_path / "x.safetensors", tmp_path / "out.safetensors")


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory) -> tuple[Path, Path]:
    """A folder and its packed form; tests copy them before they change anything."""
    return packed_sharded_model(tmp_path_factory.mktemp("damage"))


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
