"""Outputs are there as a whole or not at all, runs can be stopped and gone on with, memory stays bounded."""

import errno
import os
import pwd
import shutil
import threading
from pathlib import Path

import pytest
from checkpoints import sharded_model, tree, weights
from safetensors.torch import save_file

from unweight_ext.checkpoint import (
    CheckpointError,
    compress_checkpoint,
    decompress_checkpoint,
    output,
    verify_checkpoint,
)


class Stop:
    """A progress callback that interrupts when a file is reached."""

    def __init__(self, name: str, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.name, self.error = name, error

    def __call__(self, done: int, total: int, what: str) -> None:
        if what == self.name:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_nothing_is_left_of_an_interrupted_run(tmp_path, error):
    model = sharded_model(tmp_path / "model")
    before = tree(tmp_path)
    with pytest.raises(error):
        compress_checkpoint(model, tmp_path / "out", progress=Stop("model-00002-of-00003.safetensors", error))
    assert tree(tmp_path) == before
    compress_checkpoint(model, tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(error):
        decompress_checkpoint(tmp_path / "out", tmp_path / "back", progress=Stop("tokenizer.json", error))
    with pytest.raises(error):
        compress_checkpoint(model, tmp_path / "out", overwrite=True, progress=Stop("tokenizer.json", error))
    assert tree(tmp_path) == before


def test_overwrite_replaces_checkpoints_only(tmp_path):
    model, out = sharded_model(tmp_path / "model"), tmp_path / "out"
    compress_checkpoint(model, out)
    archive = tree(out)
    compress_checkpoint(model, out, layout="nibble", overwrite=True)
    assert tree(out) != archive
    compress_checkpoint(model, out, overwrite=True)
    assert tree(out) == archive
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    (tmp_path / "notes").write_text("x")
    (tmp_path / "link").symlink_to(out)
    for name in ("precious", "notes", "link"):
        with pytest.raises(CheckpointError, match="doesn't look like a checkpoint"):
            compress_checkpoint(model, tmp_path / name, overwrite=True)
    (tmp_path / "new").mkdir()  # an empty folder may be replaced
    compress_checkpoint(model, tmp_path / "new", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["model", "model-elsewhere", "out", "precious", "notes", "link", "new"]
    )


def test_overwrite_with_and_without_a_home(tmp_path, monkeypatch):
    model, out = sharded_model(tmp_path / "model"), tmp_path / "out"
    compress_checkpoint(model, out)
    (tmp_path / "link").symlink_to(out)
    for home in (out, tmp_path / "link"):
        monkeypatch.setenv("HOME", str(home))
        with pytest.raises(CheckpointError, match="a home folder"):
            compress_checkpoint(model, out, overwrite=True)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # as for users that the system doesn't know
    compress_checkpoint(model, out, overwrite=True)


def test_overwrite_spares_what_it_did_not_write(tmp_path):
    model, out, packed = sharded_model(tmp_path / "model"), tmp_path / "out", tmp_path / "packed"
    compress_checkpoint(model, packed)
    folders = {}
    for name in ("beside", "packed and more", "packed and a link", "packed, manifest damaged", "nested"):
        folders[name] = tmp_path / name
    for name in ("packed and more", "packed and a link", "packed, manifest damaged"):
        shutil.copytree(packed, folders[name])
    (folders["packed and more"] / "sub" / "notes.txt").write_text("x")
    (folders["packed and a link"] / "elsewhere").symlink_to(model)
    (folders["packed, manifest damaged"] / "unweight.json").write_text("{}")
    shutil.copytree(model, folders["beside"], symlinks=False)  # a plain model that compress never writes
    (folders["nested"] / "thesis").mkdir(parents=True)
    (folders["nested"] / "thesis" / "a.tex").write_text("x")
    (folders["nested"] / "x" / "y").mkdir(parents=True)
    shutil.copy(model / "model-00001-of-00003.safetensors", folders["nested"] / "x" / "y" / "t.safetensors")
    before = tree(tmp_path)
    for folder in folders.values():
        with pytest.raises(CheckpointError, match="doesn't look like a checkpoint"):
            compress_checkpoint(model, folder, overwrite=True)
        if folder.name != "beside":
            with pytest.raises(CheckpointError, match="doesn't look like a checkpoint"):
                decompress_checkpoint(packed, folder, overwrite=True)
    assert tree(tmp_path) == before
    decompress_checkpoint(packed, out)
    decompress_checkpoint(packed, out, overwrite=True)  # the very files that it makes
    (out / "config.json").unlink()
    decompress_checkpoint(packed, out, overwrite=True)
    assert tree(out) == tree(model)


def test_overwrite_spares_what_came_while_it_ran(tmp_path):
    model, out = sharded_model(tmp_path / "model"), tmp_path / "out"
    compress_checkpoint(model, out)
    before = tree(out) | {"notes.txt": b"x"}

    def note(done: int, total: int, what: str) -> None:
        (out / "notes.txt").write_text("x")

    with pytest.raises(CheckpointError, match="it holds notes.txt"):
        compress_checkpoint(model, out, overwrite=True, progress=note)
    assert tree(out) == before and sorted(p.name for p in tmp_path.iterdir()) == ["model", "model-elsewhere", "out"]


@pytest.mark.parametrize("how", ["renameat2", "without", "without links"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_taken_in_the_last_moment(tmp_path, monkeypatch, kind, how):
    """Also where the system can't rename to free names only; there the check comes right before."""
    if how != "renameat2":
        monkeypatch.setattr(output, "_renameat2", lambda *_: errno.EINVAL)
    if how == "without links":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    target = tmp_path / ("x.safetensors" if kind == "file" else "x")
    with pytest.raises(FileExistsError, match="exists already"):
        with output.atomic_output(target) as temporary:
            for path in (temporary, target):
                if kind == "folder":
                    path.mkdir()
                (path if kind == "file" else path / "a").write_text(path.name)
    assert tree(tmp_path) in ({"x.safetensors": b"x.safetensors"}, {"x": None, "x/a": b"x"})
    shutil.rmtree(target, ignore_errors=True)
    target.unlink(missing_ok=True)
    with output.atomic_output(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("sync", [True, False])
def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, sync):
    model, packed, back = sharded_model(tmp_path / "model"), tmp_path / "packed", tmp_path / "back"
    synced, fsync = [], os.fsync

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.append((path.relative_to(tmp_path).parts[1:], path.is_dir(), packed.exists(), back.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    for run, target in (
        (lambda: compress_checkpoint(model, packed, sync=sync), packed),
        (lambda: decompress_checkpoint(packed, back, sync=sync), back),
    ):
        synced.clear()
        run()
        if not sync:
            assert not synced
            continue
        *inside, last = synced
        assert all(not there[target is back] for _, _, *there in inside)
        assert {Path(*parts) for parts, _, *_ in inside} == {Path(n) for n in tree(target)} | {Path()}
        assert last[:2] == ((), True) and last[2 + (target is back)]  # the new name


def test_resume_keeps_finished_files(tmp_path):
    model, out = sharded_model(tmp_path / "model"), tmp_path / "out"
    compress_checkpoint(model, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(model, out, resume=True, progress=Stop("model-00003-of-00003.safetensors"))
    unfinished = tmp_path / ".out.unfinished"
    assert not out.exists()
    shards = sorted(unfinished.glob("*.safetensors"))
    assert [p.name for p in shards][:2] == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    times = [p.stat().st_mtime_ns for p in shards[:2]]
    (unfinished / "stray.txt").write_text("of an earlier version of the model")
    (unfinished / "sub" / "stray").mkdir(parents=True, exist_ok=True)

    summary = compress_checkpoint(model, out, resume=True)
    assert summary.resumed == 2
    assert [p.stat().st_mtime_ns for p in sorted(out.glob("*.safetensors"))[:2]] == times
    assert tree(out) == tree(tmp_path / "whole")
    assert not unfinished.exists() and not (tmp_path / ".out.unfinished.json").exists()


def test_resume_reads_files_of_any_name(tmp_path):
    model, out = sharded_model(tmp_path / "model"), tmp_path / "out"
    (model / ".unweight-unfinished.json").write_text("[]")
    (model / ".out.unfinished.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(model, out, resume=True, progress=Stop("model-00002-of-00003.safetensors"))
    assert compress_checkpoint(model, out, resume=True).resumed == 1
    assert verify_checkpoint(out, against=model).ok


@pytest.mark.parametrize(
    "what", ["source touched", "source changed", "source replaced", "stored damaged", "other layout"]
)
def test_resume_makes_again_what_it_cannot_trust(tmp_path, what):
    model, out = sharded_model(tmp_path / "model", shards=2), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compress_checkpoint(model, out, resume=True, progress=Stop("model-00002-of-00002.safetensors"))
    unfinished = tmp_path / ".out.unfinished"
    first = "model-00001-of-00002.safetensors"
    assert (unfinished / first).is_file()
    layout = "auto"
    if what == "source touched":
        os.utime(model / first, ns=(1, 1))
    elif what == "source replaced":  # by what differs in nothing but the inode and the time of change
        state = (model / first).stat()
        shutil.copy(model / first, model / "copy")
        os.rename(model / "copy", model / first)
        os.utime(model / first, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif what == "source changed":
        tensors = weights(2, 128, 256, first=50)
        state = (model / first).stat()
        save_file({n.replace("50", "0").replace("51", "1"): t for n, t in tensors.items()}, model / first)
        os.utime(model / first, ns=(state.st_atime_ns, state.st_mtime_ns))
        (model / "model.safetensors.index.json").unlink()
    elif what == "stored damaged":
        data = bytearray((unfinished / first).read_bytes())
        data[-1000] ^= 1
        (unfinished / first).write_bytes(data)
    else:
        layout = "nibble"
    summary = compress_checkpoint(model, out, layout=layout, resume=True)
    assert summary.resumed == 0
    assert verify_checkpoint(out, against=model).ok


def test_two_runs_do_not_share_an_unfinished_folder(tmp_path):
    model = sharded_model(tmp_path / "model")
    inside, finish = threading.Event(), threading.Event()

    def wait(done: int, total: int, what: str) -> None:
        inside.set()
        finish.wait(60)

    first = threading.Thread(
        target=compress_checkpoint, args=(model, tmp_path / "out"), kwargs={"resume": True, "progress": wait}
    )
    first.start()
    try:
        assert inside.wait(60)
        with pytest.raises(CheckpointError, match="another run is at work"):
            compress_checkpoint(model, tmp_path / "out", resume=True)
    finally:
        finish.set()
        first.join()
    assert verify_checkpoint(tmp_path / "out", against=model).ok
