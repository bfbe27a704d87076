"""Memory stays bounded, whatever the shapes; the pipeline that sees to it."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import bf16, write_safetensors

from unweight_ext.checkpoint import compress_checkpoint, inspect_checkpoint
from unweight_ext.checkpoint.memory import JOB_SCRATCH
from unweight_ext.checkpoint.pipeline import Stage, run_jobs

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
        *(([shape], 4, layout) for shape in THIN for layout in ("nibble", "huffman")),
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
