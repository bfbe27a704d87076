"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import torch
from samples import weight
from torch import nn

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_python_of_the_readme(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16), nn.Linear(128, 64, dtype=torch.float32))
    names = {"model": model, "weight": weight("trained", 128, 256), "x": torch.randn(3, 256, dtype=torch.bfloat16)}
    exec(compile(code, "README.md", "exec"), names)
    assert "only bfloat16 is packed" in capsys.readouterr().out
    assert torch.equal(names["z"], nn.functional.linear(names["x"], names["weight"]))
    torch.testing.assert_close(names["y"], names["z"], atol=0.05, rtol=0.05)
    model.load_state_dict(torch.load("packed.pt", weights_only=True))


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).resolve().parent.parent / target).exists(), target
