"""The kernel that docs/KERNELS.md shows is reported as it says there, and passes without its bug."""

import re
from pathlib import Path

import pytest
from ptxsim import KernelReport

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "KERNELS.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_kernel_of_the_page(tmp_path, monkeypatch):
    (kernel,), (_, code) = blocks("cuda"), blocks("python")
    run = compile(code, "KERNELS.md", "exec")
    monkeypatch.chdir(tmp_path)
    Path("mine.cu").write_text(kernel)
    with pytest.raises(KernelReport, match=r"race: reverse at mine\.cu:6"):
        exec(run, {})
    Path("mine.cu").write_text(kernel.replace("// __sync", "__sync"))
    exec(run, {})
