"""What importing the package costs, and what it says when its compiled part is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unweight_ext

PACKAGE = Path(unweight_ext.__file__).parent


# An editable install would supply from the real tree what is missing in a copy of it.
ONLY_HERE = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '_EditableFinder' not in repr(f)]\n"


def run(code: str, path: Path) -> subprocess.CompletedProcess:
    code = ONLY_HERE + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=path, timeout=120)


def test_importing_registers_the_operators_and_little_else():
    """What it costs in seconds: bench/import_time.py."""
    code = """
import sys, torch
before = set(sys.modules)
import unweight_ext
assert torch.ops.unweight.linear.default
print(*sorted(set(sys.modules) - before))
"""
    result = run(code, PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) == {
        "unweight_ext",
        *(f"unweight_ext.{name}" for name in ("_C", "derivatives", "ops")),
    }


def test_the_command_loads_torch_only_for_work():
    code = """
import sys
from unweight_ext_command import main
for arguments in ("--version", "--help", "compress --help", "shrink", "compress a", "verify nothere", "demo nothere"):
    sys.argv[1:] = arguments.split()
    try:
        main()
    except SystemExit:
        pass
print("torch" in sys.modules)
sys.argv[1:] = ["inspect", "setup.py"]
print(main())
print(sys.modules["torch"].ops.unweight.linear.default)
"""
    result = run(code, PACKAGE.parent)
    assert result.stdout.splitlines()[-3:] == ["False", "2", "unweight.linear.default"], result.stderr


@pytest.fixture
def unbuilt(tmp_path):
    """The package as it is in a source tree that nobody has built."""
    shutil.copytree(PACKAGE, tmp_path / "unweight_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_without_the_compiled_part_it_says_what_to_do(unbuilt):
    code = """
import unweight_ext
for use in ("unweight_ext.pack", "unweight_ext.Linear", "__import__('unweight_ext.ops')"):
    try:
        eval(use)
    except ImportError as error:
        print(error)
"""
    result = run(code, unbuilt)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("unweight_ext: its compiled part doesn't load (")
        assert line.endswith("build it in the source folder with `pip install --no-build-isolation .`")


def test_the_reference_needs_no_compiled_part(unbuilt):
    code = """
import sys, numpy as np
from unweight_ext import reference
bits = np.arange(100, dtype=np.uint16).reshape(4, 25)
assert (reference.unpack(reference.pack(bits, "huffman")) == bits).all()
assert "torch" not in sys.modules
"""
    result = run(code, unbuilt)
    assert result.returncode == 0, result.stderr


def test_a_broken_compiled_part_is_no_secret(unbuilt):
    (unbuilt / "unweight_ext" / "_C.abi3.so").write_bytes(b"\x7fELF, but not for long")
    result = run("import unweight_ext", unbuilt)
    assert result.returncode == 1
    assert "ImportError: unweight_ext: its compiled part doesn't load" in result.stderr


def test_public_names():
    for name in unweight_ext.__all__:
        assert getattr(unweight_ext, name) is not None
        assert name in dir(unweight_ext)
    with pytest.raises(AttributeError, match="module 'unweight_ext' has no attribute 'nonsense'"):
        _ = unweight_ext.nonsense
