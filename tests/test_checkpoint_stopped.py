"""Commands that are stopped by signals, full disks and sources that change: nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import bf16, sharded_model, write_safetensors

from unweight_ext.checkpoint import CheckpointError, compress_checkpoint


def big_file(folder: Path, megabytes: int) -> Path:
    """A file of 4 MiB matrices that look trained; they repeat, which packing doesn't notice."""
    folder.mkdir()
    one = bf16("trained", 1024, 2048)
    path = folder / "model.safetensors"
    write_safetensors(path, {f"layer{i}.weight": one for i in range(megabytes // 4)})
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


@contextmanager
def stopped_run(source: Path, target: Path) -> Iterator[None]:
    """A compress that has begun to write and stands still. In the end it is killed."""
    command = [sys.executable, "-m", "unweight_ext", "compress", source, target, "--threads", "1"]
    before = set(target.parent.iterdir())
    with subprocess.Popen(command) as process:
        try:
            while not {p for p in set(target.parent.iterdir()) - before if (p / "model.safetensors").exists()}:
                assert process.poll() is None
                time.sleep(0.001)
            process.send_signal(signal.SIGSTOP)
            yield
        finally:
            process.kill()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    source, small = big_file(tmp_path / "big", 128).parent, big_file(tmp_path / "small", 4).parent
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for name in (".out.tmp-0123abcd", ".out.tmp-0123abcd-0123abcd"):  # of another machine
        (tmp_path / name).mkdir()
    before = set(tmp_path.iterdir())
    with stopped_run(source, out):
        pass
    (killed,) = set(tmp_path.iterdir()) - before
    with stopped_run(source, out):
        (running,) = set(tmp_path.iterdir()) - before
        assert running != killed
        compress_checkpoint(small, out)
        assert set(tmp_path.iterdir()) == before | {running, out}
    with stopped_run(source, elsewhere):
        (other,) = set(tmp_path.iterdir()) - before - {running, out}
    compress_checkpoint(small, out, overwrite=True)
    assert set(tmp_path.iterdir()) == before | {out, other}


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


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_resume_empties_only_what_an_interrupted_run_left(tmp_path, kind):
    model = sharded_model(tmp_path / "model")
    precious, unfinished = tmp_path / "precious", tmp_path / ".out.unfinished"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    if kind == "link":
        unfinished.symlink_to(precious)
    else:
        precious = precious.rename(unfinished)
    with pytest.raises(CheckpointError, match="interrupted run"):
        compress_checkpoint(model, tmp_path / "out", resume=True)
    assert (precious / "thesis.txt").read_text() == "years"
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.unfinished.json").exists()


def test_a_run_without_resume_tells_what_one_with_it_left(tmp_path):
    model, out, unfinished = sharded_model(tmp_path / "model"), tmp_path / "out", tmp_path / ".out.unfinished"

    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(model, out, resume=True, progress=stop)
    assert unfinished.is_dir()
    (note,) = compress_checkpoint(model, out).notes
    assert note == f"{unfinished} holds files of an interrupted --resume, not used by this run"
    assert compress_checkpoint(model, out, resume=True, overwrite=True).notes == []
    assert not unfinished.exists()
    assert compress_checkpoint(model, out, overwrite=True).notes == []


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path):
    source = tmp_path / "x.safetensors"
    write_safetensors(source, {f"t{i}.weight": bf16("trained", 256, 256) for i in range(8)})

    def change(done: int, total: int, what: str) -> None:
        os.utime(source, ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"x\.safetensors.*changed while it was read"):
        compress_checkpoint(source, tmp_path / "out.safetensors", progress=change)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("threads", [-1, 1025, 10**20])
def test_threads_that_no_machine_has_are_refused(tmp_path, threads):
    with pytest.raises(CheckpointError, match="threads: "):
        compress_checkpoint(tmp_path, tmp_path / "out", threads=threads)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_streams_are_nobody_s_business(tmp_path, closed):
    source, out = tmp_path / "x.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {"t.weight": bf16("trained", 256, 256)})
    redirect = {"stdout": ">&-", "stderr": "2>&-"}[closed]
    command = f'"{sys.executable}" -m unweight_ext compress "{source}" "{out}" {redirect}'
    assert subprocess.run(["sh", "-c", command], timeout=120).returncode == 0
    assert out.exists()
