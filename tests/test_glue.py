"""Between torch and the C++ code: memory as callers hand it over, threads, exceptions."""

import threading
import time

import pytest
import torch
from samples import LAYOUTS, assert_same_bits, weight

import unweight_ext as u

ops = torch.ops.unweight


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an odd address, as a file may hand them out."""
    size = tensor.numel() * tensor.element_size()
    memory = bytearray(size + 16)
    start = (1 - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()) % 16
    memory[start : start + size] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    result = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
    assert result.data_ptr() % 2 == 1
    return result


@pytest.mark.filterwarnings("ignore:The given buffer")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_misaligned_memory_does_not_matter(layout: str) -> None:
    w = weight("few outsiders", 130, 200)
    packed = u.pack(w, layout)
    assert torch.equal(u.pack(misaligned(w), layout), packed)
    assert_same_bits(ops.unpack(misaligned(packed), 200, torch.bfloat16), w)
    assert torch.equal(ops._transcode(misaligned(packed), 0, 0), u.transcode(packed, "raw"))
    ids = torch.tensor([3, 129])
    assert_same_bits(ops.embedding(misaligned(ids), misaligned(packed), 200), w[ids])
    clean = u.pack(weight("trained", 130, 200), layout)
    for dtype in (torch.bfloat16, torch.float32):
        x, bias = torch.randn(5, 200).to(dtype), torch.randn(130).to(dtype)
        y = ops.linear(x, clean, bias)
        assert torch.equal(ops.linear(misaligned(x), misaligned(clean), misaligned(bias)), y)


def test_narrow_ids_and_no_ids() -> None:
    w = weight("trained", 70, 64)
    packed = u.pack(w)
    ids = torch.tensor([[69, 0, 5]])
    assert_same_bits(ops.embedding(ids.int(), packed, 64), w[ids])
    assert ops.embedding(ids[:0], packed, 64).shape == (0, 3, 64)


def test_no_matrices() -> None:
    packed = u.pack(torch.stack([weight("trained", 8, 16)] * 2), stacked=True)
    assert ops.unpack(packed[:0], 16, torch.bfloat16).shape == (0, 8, 16)
    ops._verify(packed[:0])
    for call in (lambda: ops._describe(packed[:0]), lambda: ops._transcode(packed[:0], 0, 0)):
        with pytest.raises(RuntimeError, match="^packed_w: no matrices, expected at least one"):
            call()


def test_packed_bytes_are_taken_only_as_pack_made_them() -> None:
    packed = u.pack(weight("trained", 64, 128))
    wide = torch.cat([packed, packed], 1)[:, : packed.shape[1]]
    for call in (lambda: ops.linear(torch.zeros(1, 128), wide), lambda: ops.unpack(wide, 128, torch.bfloat16)):
        with pytest.raises(RuntimeError, match="^packed_w: is not contiguous"):
            call()


@pytest.mark.parametrize(
    "shape, message",
    [
        ([64], "shape: 1 dimensions, expected 2 to 8"),
        ([64, *[1] * 8], "shape: 9 dimensions, expected 2 to 8"),
        ([64, 64], r"shape: \[64, product 64\], expected \[64, product 128\]"),
        ([32, 128], r"shape: \[32, product 128\], expected \[64, product 128\]"),
        ([64, -128], "shape: dimension 1 is -128"),
        ([64, 0, 128], "shape: dimension 1 is 0"),
        # 2^32 · 2^32 · 128 is 0 modulo 2^64.
        ([64, 2**32, 2**32, 128], "shape: dimension 1 is 4294967296"),
    ],
)
def test_shapes_that_are_not_the_weight_s(shape: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{message}"):
        ops._pack(weight("trained", 64, 128), 2, shape, 0)


def test_stacked_headers_must_agree() -> None:
    narrow, wide = u.pack(weight("trained", 64, 100), "raw"), u.pack(weight("trained", 64, 128), "raw")
    stacked = torch.stack([u.pad_row_bytes(p, 1024) for p in (wide, narrow)])
    with pytest.raises(RuntimeError, match="^packed_w: matrix 1 has in_features 100, expected 128 as matrix 0 has"):
        ops._transcode(stacked, 2, 0)


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 64])
def test_an_error_on_any_thread_reaches_the_caller(threads: int) -> None:
    """The first one, with its own text; and the threads are as good as before."""
    w = weight("trained", 64 * 40, 128)
    packed = u.pack(w, "huffman")
    damaged = packed.clone()
    damaged.view(-1)[packed.numel() // 2] ^= 1
    for _ in range(20):
        with pytest.raises(RuntimeError, match=r"^packed: the checksum of row block \d+"):
            ops._transcode(damaged, 0, threads)
        assert torch.equal(ops._transcode(packed, 1, threads), packed)


def test_negative_threads() -> None:
    with pytest.raises(RuntimeError, match="^threads: -1, expected 0"):
        ops._pack(weight("trained", 4, 4), 2, [4, 4], -1)


def test_operators_release_the_interpreter_lock() -> None:
    """Another Python thread goes on while an operator works: compress reads and writes files beside it."""
    w = weight("trained", 2048, 4096)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 1 and len(ticks) < 5:
            time.sleep(0.001)
        spans = []
        for _ in range(5):
            begin = time.perf_counter()
            ops._pack(w, 3, [2048, 4096], 1)
            spans.append((begin, time.perf_counter()))
    finally:
        done.set()
        thread.join()
    # With the lock held there could be none between begin and end.
    assert any(begin < t < end for begin, end in spans for t in ticks)
