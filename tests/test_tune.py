"""`unweight tune`: explanations, tables and their files, and what is measured. Times themselves need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from checkpoints import bf16, other, write_safetensors
from hypothesis import given
from hypothesis import strategies as st
from native_module import native

import unweight_ext
from unweight_ext import cli
from unweight_ext.ops import LAYOUTS
from unweight_ext.tuning import command, measure, table
from unweight_ext.tuning.choices import BUCKETS, bucket_of, default_choice
from unweight_ext.tuning.costs import TILED
from unweight_ext.tuning.explain import explain
from unweight_ext.tuning.predict import CONFIGS, Product, predict, predict_scratch
from unweight_ext.tuning.rates import GPUS

GPU = "GPU of a test"
ENTRY = table.Entry("huffman", 14336, 4096, 512, 128, 50.0, 60.0)
TABLE = table.Table(GPU, (ENTRY, table.Entry("nibble", 64, 128, 1024, 0, 1.5, 2.0)), "now, here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "unweight_ext"
    unweight_ext.forget_tuned(GPU)


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["tune", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# The rule of the kernels, in Python.


@given(layout=st.sampled_from(LAYOUTS), tokens=st.integers(1, 40000))
def test_the_default_choice_is_the_operators(layout: str, tokens: int) -> None:
    config = native.choose(LAYOUTS.index(layout), 4096, 4096, tokens)
    assert default_choice(layout, tokens) == (None if config < 0 else CONFIGS[config])
    assert bucket_of(tokens) == native.token_bucket(tokens)


# Explanations.


def test_explanations_name_the_choice_and_its_limiter(capsys: pytest.CaptureFixture) -> None:
    code, out, err = run(capsys, "--explain", 14336, 4096, 16, "--gpu", "H200")
    assert (code, err) == (0, "")
    assert "14336 x 4096, huffman, 16 rows of x, on an H200 (predicted, not measured)" in out
    assert "chosen: 16 tokens, limited by HBM" in out and "* 16 tokens" in out and "scratch" in out


def test_explanations_as_json(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "--explain", 4096, 4096, 300, "--layout", "raw", "--json")
    found = json.loads(out)
    assert code == 0 and found["predicted"] is True and (found["bucket"], found["gpu"]) == (512, "H100")
    assert [way["name"] for way in found["ways"]] == ["128 tokens", "256 tokens", "scratch"]
    product = Product.of(300, (4096, 4096))
    expected = [predict(product, "raw", config, GPUS["H100"]) for config in CONFIGS[-2:]]
    expected.append(predict_scratch(product, "raw", GPUS["H100"]))
    assert [way["microseconds"] for way in found["ways"]] == pytest.approx([p.microseconds for p in expected])
    assert found["chosen"] == "256 tokens" and all(way["limiter"] for way in found["ways"])
    assert all(sum(way["parts"].values()) == pytest.approx(way["microseconds"]) for way in found["ways"])


def test_explanations_need_no_gpu_and_no_torch() -> None:
    code = "import sys, unweight_ext_command; from unweight_ext.cli import main; "
    code += "assert main(['tune', '--explain', '64', '64', '1', '-q']) == 0; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--explain", 0, 64, 1), "N: 0, expected at least 1"),
        (("--explain", 64, 64, 0), "M: 0, expected at least 1"),
        (("--shape", "64*64"), "--shape 64*64: expected OUTxIN, as in 14336x4096"),
        (("--shape", "0x64"), "--shape 0x64: expected OUTxIN"),
        (("--shape", "64x64", "--tokens", 0), "--tokens 0: expected at least 1"),
        ((), "nothing to measure: give a checkpoint with BF16 weights, or --shape OUTxIN"),
        (("--explain", 1, 1, 1, "--gpu", "B200"), "argument --gpu: invalid choice: 'B200'"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture, cache: Path) -> None:
    code, out, err = run(capsys, "--shape", "64x128")
    assert (code, out) == (2, "")
    assert err == f"unweight: error: no GPU here that torch {torch.__version__} can use; --explain needs none\n"
    assert not cache.exists()
    code, out, _ = run(capsys, "--shape", "64x128", "--json")
    assert json.loads(out)["exit_code"] == code == 2


# What is measured.


def options(**changes: object) -> Namespace:
    return Namespace(**{"path": None, "shape": [], "layout": None, "tokens": None, **changes})


def test_cases_are_shapes_times_layouts_times_buckets() -> None:
    cases = command.cases_of(options(shape=["64x128", "64x128", "128x64"], tokens=[1, 8, 100], layout=["nibble"]))
    expected = [(64, 128, 8), (64, 128, 128), (128, 64, 8), (128, 64, 128)]
    assert [(c.out_features, c.in_features, c.tokens) for c in cases] == expected
    assert {c.layout for c in command.cases_of(options(shape=["64x128"]))} == {"huffman", "nibble"}


def test_a_checkpoints_shapes(tmp_path: Path) -> None:
    tensors = {
        "a.weight": bf16("trained", 512, 256),
        "b.weight": bf16("trained", 512, 256),
        "embed_tokens.weight": bf16("trained", 1024, 256),
        "small.weight": bf16("trained", 8, 256),
        "norm.weight": bf16("trained", 512),
        "wide.weight": other("F32", 512, 300),
        "c.weight": bf16("trained", 256, 512),
    }
    file = tmp_path / "model.safetensors"
    write_safetensors(file, tensors)
    packed = tmp_path / "packed.safetensors"
    unweight_ext.compress_checkpoint(file, packed)
    for path in (file, packed):
        assert sorted(command.shapes_of_checkpoint(str(path))) == [(256, 512), (512, 256)]


@pytest.mark.parametrize("layout", TILED)
@pytest.mark.parametrize("tokens", BUCKETS)
def test_the_fastest_way_is_taken_if_it_is_clearly_faster(layout: str, tokens: int) -> None:
    case = measure.Case(layout, 4096, 4096, tokens)
    usual = default_choice(layout, tokens)
    usual_way = usual.tokens if usual else measure.SCRATCH
    for way in measure.ways_of(case):
        entry = measure.fastest(case, lambda w, way=way: 5.0 if w == way else 10.0)
        assert (entry.config, entry.microseconds) == (way, 5.0)
        assert entry.default_microseconds == (5.0 if way == usual_way else 10.0)
        close = measure.fastest(case, lambda w, way=way: 9.9 if w == way else 10.0)
        assert close.config == usual_way
        # Whatever is fastest, the operators accept it.
        table.apply(table.Table(GPU, (entry,)))
        assert tuned() == [LAYOUTS.index(layout), 4096, 4096, tokens, way]


def tuned() -> list[int]:
    return list(torch.ops.unweight._tuned(GPU))


def test_copies_are_more_than_three_caches() -> None:
    for size in (1, 1 << 20, 50 << 20, 1 << 30):
        copies = measure.copies_for(size, 50 << 20)
        assert copies >= 2 and (copies - 1) * size >= 3 * (50 << 20)


# Files.


def test_a_table_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    table.save(TABLE, path)
    assert table.read(path) == TABLE
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_a_table_that_cant_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table.save(TABLE, path)
    with pytest.raises(TypeError):
        table.save(replace(TABLE, about=object()), path)
    assert table.read(path) == TABLE and len(list(tmp_path.iterdir())) == 1


def test_where_tables_are(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert table.default_path("NVIDIA H100 80GB HBM3") == cache / "tuned-NVIDIA-H100-80GB-HBM3.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert table.default_path("a/../b").parent == Path.home() / ".cache" / "unweight_ext"
    assert table.default_path("a/../b").name == "tuned-a-b.json"


GOOD = {"version": 1, "gpu": GPU, "entries": [asdict(ENTRY)]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "list, expected an object"),
        ("{}", "no field 'version'"),
        (json.dumps({**GOOD, "version": 2}), "version 2, expected 1"),
        (json.dumps({**GOOD, "gpu": ""}), "gpu: '', expected a name"),
        (json.dumps({**GOOD, "entries": [1]}), "an entry is 1, expected an object"),
        (json.dumps({**GOOD, "entries": [{}]}), "no field 'layout'"),
        (
            json.dumps({**GOOD, "entries": [{**asdict(ENTRY), "layout": "archive"}]}),
            "layout: 'archive', expected one of",
        ),
        (json.dumps({**GOOD, "entries": [{**asdict(ENTRY), "tokens": 500}]}), "tokens: 500, expected a power of two"),
        (json.dumps({**GOOD, "entries": [{**asdict(ENTRY), "config": "a"}]}), "config: 'a', expected a whole number"),
    ],
)
def test_what_isnt_a_table_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        unweight_ext.load_tuned(path)
    assert str(error.value).startswith(f"{path}: not a table of `unweight tune`: ") and message in str(error.value)


def test_a_loaded_table_is_what_operators_follow(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table.save(TABLE, path)
    assert unweight_ext.load_tuned(os.fspath(path)) == TABLE
    assert tuned() == [1, 14336, 4096, 512, 128, 2, 64, 128, 1024, 0]
    unweight_ext.forget_tuned(GPU)
    assert tuned() == []


def test_a_table_that_would_break_invariance_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table.save(table.Table(GPU, (replace(ENTRY, tokens=8, config=0),)), path)
    with pytest.raises(RuntimeError, match="config: -1 for 8 tokens, expected one of 8"):
        unweight_ext.load_tuned(path)
    assert tuned() == []


def test_new_entries_replace_old_ones() -> None:
    other = replace(ENTRY, tokens=1024)
    newer = replace(ENTRY, config=256)
    assert table.merged([ENTRY, other], [newer]) == (newer, other)


def test_explain_refuses_what_it_doesnt_know() -> None:
    with pytest.raises(ValueError, match="gpu: 'B200', expected one of H100, H200"):
        explain(64, 64, 1, "huffman", "B200")
