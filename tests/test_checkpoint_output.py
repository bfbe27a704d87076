"""Outputs are there as a whole or not at all, runs can be stopped and gone on with, memory stays bounded."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import bf16, sharded_model, tree, weights, write_safetensors
from safetensors.torch import save_file

from unweight_ext.checkpoint import (
    CheckpointError,
    compress_checkpoint,
    decompress_checkpoint,
    inspect_checkpoint,
    output,
    verify_checkpoint,
)
from unweight_ext.checkpoint.memory import JOB_SCRATCH
from unweight_ext.checkpoint.pipeline import Stage, run_jobs


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
    "what", ["source touched", "source changed", "source replaced", "stored damaged", "other layout", "no journal"]
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
    elif what == "other layout":
        layout = "nibble"
    else:
        (tmp_path / ".out.unfinished.json").unlink()
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


MEMORY = """
import re, sys
import unweight_ext.checkpoint as c
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = peak()
run = sys.argv[1]
if run == "compress":
    c.compress_checkpoint(sys.argv[2], sys.argv[3], threads=int(sys.argv[4]), layout=sys.argv[5])
elif run == "decompress":
    c.decompress_checkpoint(sys.argv[2], sys.argv[3], threads=int(sys.argv[4]))
elif run == "verify":
    assert c.verify_checkpoint(sys.argv[2], threads=int(sys.argv[4])).ok
else:
    c.inspect_checkpoint(sys.argv[2], threads=int(sys.argv[4]))
print(peak() - before)
"""


def growth(run: str, source: Path, target: Path, threads: int, layout: str = "auto") -> int:
    """By how many bytes a command's peak memory exceeds that of the import."""
    command = [sys.executable, "-c", MEMORY, run, source, target, str(threads), layout]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout)


def synthetic(path: Path, sizes: list[tuple[int, int]], pieces: int) -> None:
    """`pieces` times matrices of `sizes`, written without holding them all."""
    rng = np.random.default_rng(0)
    values = (rng.standard_t(5, 1 << 20) * 0.02).astype(np.float32).view(np.uint32)
    block = (values >> 16).astype(np.uint16).tobytes()
    header, position = {}, 0
    shapes = [s for _ in range(pieces) for s in sizes]
    for i, (n, k) in enumerate(shapes):
        header[f"t{i}.weight"] = {"dtype": "BF16", "shape": [n, k], "data_offsets": [position, position + 2 * n * k]}
        position += 2 * n * k
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = position
        while left:
            file.write(block[:left])
            left -= min(left, len(block))


# Matrices that tiles of 64 x 128 would pad to many times their size, or to a little more.
THIN = [(1 << 21, 1), (1 << 20, 2), (1, 1 << 21), (1 << 15, 80), (33, 1 << 16)]


@pytest.mark.parametrize("layout", ["nibble", "huffman"])
def test_thin_matrices_are_not_padded(tmp_path, layout):
    source, packed = tmp_path / "x.safetensors", tmp_path / "packed.safetensors"
    write_safetensors(source, {"thin.weight": bf16("trained", 1 << 16, 1), "good.weight": bf16("trained", 64, 512)})
    compress_checkpoint(source, packed, layout=layout)
    assert {t.name: t.layout for t in inspect_checkpoint(packed).tensors} == {
        "thin.weight": "stored",
        "good.weight": layout,
    }
    assert growth("compress", source, tmp_path / "again.safetensors", 1, layout) < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(
    ("sizes", "pieces", "layout"),
    [
        ([(4096, 5120), (1024, 1024)], 8, "archive"),
        ([(1024, 2048)], 100, "archive"),
        ([(65536, 1024)], 3, "archive"),
        ([(512, 512)], 800, "archive"),
        *(([shape], 8, layout) for shape in THIN for layout in ("nibble", "huffman", "archive")),
    ],
    ids=lambda value: "-".join(f"{n}x{k}" for n, k in value) if isinstance(value, list) else str(value),
)
def test_memory_stays_bounded(tmp_path, sizes, pieces, layout, threads):
    folder = tmp_path / "model"
    folder.mkdir()
    synthetic(folder / "model.safetensors", sizes, pieces)
    largest = max(2 * n * k for n, k in sizes)
    allowed = 3 * largest + (64 << 20)
    packed = tmp_path / "packed"
    used = {
        "compress": growth("compress", folder, packed, threads, layout),
        "verify": growth("verify", packed, packed, threads),
        "inspect": growth("inspect", packed, packed, threads),
        "decompress": growth("decompress", packed, tmp_path / "back", threads),
    }
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert max(used.values()) <= allowed, {k: f"{v >> 20} MiB of {allowed >> 20}" for k, v in used.items()}


class Piece:
    """A job of the pipeline that counts what is held."""

    def __init__(self, nbytes: int, cost: int, kept: int) -> None:
        self.nbytes, self.cost, self.kept = nbytes, cost, kept


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_pipeline_places_in_order_within_its_budget(threads):
    rng = np.random.default_rng(threads)
    jobs = [Piece(int(n), int(n) * 2, int(n) // 2) for n in rng.integers(1, 100, 300)]
    lock, held, most, placed, finished = threading.Lock(), [0], [0], [], []

    def hold(change: int) -> None:
        with lock:
            held[0] += change
            most[0] = max(most[0], held[0])

    def work(job: Piece, n: int) -> None:
        assert 1 <= n <= threads
        hold(job.cost + JOB_SCRATCH)
        time.sleep(job.nbytes * 1e-5)
        hold(job.kept - job.cost - JOB_SCRATCH)

    def finish(job: Piece) -> None:
        hold(-job.kept)
        finished.append(job)

    budget = 250 + 3 * JOB_SCRATCH
    run_jobs(jobs, Stage(work, placed.append, finish), threads=threads, budget=budget)
    assert placed == jobs and sorted(map(id, finished)) == sorted(map(id, jobs))
    assert most[0] <= budget and held[0] == 0


@pytest.mark.parametrize("where", ["work", "place", "finish"])
def test_the_pipeline_passes_errors_on(where):
    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    steps = {"work": lambda job, n: None, "place": lambda job: None, "finish": lambda job: None} | {where: fail}
    before = threading.active_count()
    with pytest.raises(OSError, match="no space"):
        run_jobs([Piece(1, 1, 1)] * 50, Stage(**steps), threads=4, budget=10)
    assert threading.active_count() == before


def test_the_pipeline_survives_signals_at_any_moment():
    """Each run is struck by a signal at another moment, and ends; none waits for workers that ended long ago."""

    class Strike(Exception):
        pass

    def strike(*_: object) -> None:
        raise Strike

    def striker() -> None:
        for i in range(200):
            ready.acquire()
            time.sleep(1e-4 + i * 1e-5)
            signal.pthread_kill(main, signal.SIGTERM)

    main, ready, struck = threading.get_ident(), threading.Semaphore(0), 0
    old = signal.signal(signal.SIGTERM, strike)
    thread = threading.Thread(target=striker)
    thread.start()
    nothing = Stage(lambda job, n: None, lambda job: None, lambda job: None)
    try:
        while thread.is_alive():
            inside = True
            try:
                ready.release()
                run_jobs([Piece(1, 1, 1)] * 20, nothing, threads=4, budget=100 * JOB_SCRATCH)
                inside = False
                time.sleep(0.1)  # until it strikes
            except Strike:
                struck += inside
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, old)
    assert struck > 10
    deadline = time.monotonic() + 10
    while any("_worker" in t.name for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
