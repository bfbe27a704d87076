"""Commands that are stopped by signals, full disks and sources that change: nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import bf16, write_safetensors

from unweight_ext.checkpoint import CheckpointError, compress_checkpoint


def big_file(folder: Path, megabytes: int) -> Path:
    """A file of 4 MiB matrices that look trained; they repeat, which packing doesn't notice."""
    folder.mkdir()
    one = bf16("trained", 1024, 2048)
    path = folder / "model.safetensors"
    write_safetensors(path, {f"layer{i}.weight": one for i in range(megabytes // 4)})
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing_behind(tmp_path, number):
    source = big_file(tmp_path / "model", 128)
    command = [sys.executable, "-m", "unweight_ext", "compress", source.parent, tmp_path / "out", "--threads", "1"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.tmp-*/model.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "unweight: error: interrupted\n"
    assert json.loads(out) == {"error": "interrupted", "exit_code": 130}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_impatient_user(tmp_path):
    """More signals while the first is dealt with."""
    source = big_file(tmp_path / "model", 128)
    command = [sys.executable, "-m", "unweight_ext", "compress", source.parent, tmp_path / "out", "--threads", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".out.tmp-*/model.safetensors")):
        assert process.poll() is None
        time.sleep(0.001)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "unweight: error: interrupted\n"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_write_that_fails(tmp_path):
    """The limit of a file's size stands in for a full disk: the system refuses the write in the same place."""
    model = big_file(tmp_path / "model", 16).parent
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000));"
        "from unweight_ext.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "compress", model, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("unweight: error:") and "large" in done.stderr and done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("rows", [64, 2048])
def test_a_source_that_shrinks_while_it_is_read(tmp_path, rows):
    source = tmp_path / "x.safetensors"
    write_safetensors(source, {f"t{i}.weight": bf16("trained", rows, 256) for i in range(4)})

    def cut(done: int, total: int, what: str) -> None:
        os.truncate(source, 5000)

    with pytest.raises(CheckpointError, match="truncated while it was read"):
        compress_checkpoint(source, tmp_path / "out.safetensors", threads=1, progress=cut)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_source_that_shrinks_while_it_is_packed(tmp_path):
    """All the time, from another process: a map of the file would end in SIGBUS. Here it is an error or succeeds."""
    source = big_file(tmp_path / "model", 64)
    size = source.stat().st_size
    code = (
        "import os, sys\nfor i in range(10**9):\n"
        f"    os.truncate({str(source)!r}, 9000); os.truncate({str(source)!r}, {size})\n"
        "    if i == 100: print(flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            command = [sys.executable, "-m", "unweight_ext", "compress", source, tmp_path / "out.safetensors"]
            for _ in range(3):
                done = subprocess.run([*command, "-f"], capture_output=True, text=True, timeout=60)
                assert done.returncode == 0 or (done.returncode == 2 and "truncated" in done.stderr), done
        finally:
            process.kill()
