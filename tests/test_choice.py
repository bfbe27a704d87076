"""Which instance of the fused product a call runs: csrc/cuda/linear/choice.h."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_module import native

RAW, HUFFMAN, NIBBLE, ARCHIVE, ANY = 0, 1, 2, 3, -1
SCRATCH = -1
CONFIGS = native.linear_configs()
INVARIANT = 64
TILED = st.sampled_from([ANY, RAW, HUFFMAN, NIBBLE])
SIZES = st.integers(1, 1 << 20)


@pytest.fixture
def gpu() -> Iterator[str]:
    """The name of a GPU that has no table when the test is over."""
    yield "GPU of a test"
    native.set_tuned("GPU of a test", [])


def tokens_of(config: int) -> int:
    return CONFIGS[config][0]


@given(layout=TILED, n=SIZES, k=SIZES, tokens=st.integers(0, INVARIANT))
def test_few_tokens_get_the_smallest_instance_that_takes_them(layout: int, n: int, k: int, tokens: int) -> None:
    config = native.choose(layout, n, k, tokens)
    assert tokens_of(config) == min(t for t, _ in CONFIGS if t >= tokens)


@given(layout=TILED, n=SIZES, k=SIZES, tokens=st.integers(INVARIANT + 1, 1 << 20))
def test_more_tokens_never_get_an_instance_for_few(layout: int, n: int, k: int, tokens: int) -> None:
    config = native.choose(layout, n, k, tokens)
    assert config == SCRATCH or tokens_of(config) > INVARIANT


@given(n=SIZES, k=SIZES, tokens=st.integers(0, 1 << 20))
def test_archives_are_always_decoded(n: int, k: int, tokens: int) -> None:
    assert native.choose(ARCHIVE, n, k, tokens) == SCRATCH


@pytest.mark.parametrize("layout", [ANY, RAW, HUFFMAN, NIBBLE])
def test_there_is_one_crossover(layout: int) -> None:
    scratch = [native.choose(layout, 4096, 4096, tokens) == SCRATCH for tokens in range(0, 16384, 64)]
    assert scratch == sorted(scratch) and scratch[-1] and not scratch[0]


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 8), (8, 8), (9, 16), (64, 64), (65, 128), (16384, 16384), (1 << 30, 16384)]
)
def test_buckets(tokens: int, bucket: int) -> None:
    assert native.token_bucket(tokens) == bucket


def test_a_tuned_entry_counts_for_its_gpu_layout_shape_and_bucket(gpu: str) -> None:
    native.set_tuned(gpu, [(HUFFMAN, 4096, 4096, 512, SCRATCH), (HUFFMAN, 4096, 4096, 8, 2)])
    for tokens in (257, 512):
        assert native.choose(HUFFMAN, 4096, 4096, tokens, gpu=gpu) == SCRATCH
    assert native.choose(HUFFMAN, 4096, 4096, 3, gpu=gpu) == 2
    for call in (
        (HUFFMAN, 4096, 4096, 256, 132, gpu),
        (HUFFMAN, 4096, 4096, 513, 132, gpu),
        (HUFFMAN, 4096, 4097, 512, 132, gpu),
        (HUFFMAN, 4097, 4096, 512, 132, gpu),
        (NIBBLE, 4096, 4096, 512, 132, gpu),
        (HUFFMAN, 4096, 4096, 512, 132, "another"),
        (HUFFMAN, 4096, 4096, 512, 132, ""),
    ):
        assert native.choose(*call) == native.choose(*call[:4])


def test_a_table_replaces_the_one_before(gpu: str) -> None:
    native.set_tuned(gpu, [(RAW, 64, 64, 128, 5)])
    native.set_tuned(gpu, [(RAW, 64, 128, 256, SCRATCH), (NIBBLE, 64, 64, 64, 3)])
    assert native.tuned(gpu) == [(RAW, 64, 128, 256, SCRATCH), (NIBBLE, 64, 64, 64, 3)]
    native.set_tuned(gpu, [])
    assert native.tuned(gpu) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((ARCHIVE, 1, 1, 8, 0), "layout: 3, expected -1"),
        ((-2, 1, 1, 8, 0), "layout: -2, expected -1"),
        ((RAW, 1, 1, 100, 5), "tokens: 100, expected a power of two in 8...16384"),
        ((RAW, 1, 1, 128, len(CONFIGS)), f"config: {len(CONFIGS)}, expected 0...{len(CONFIGS) - 1}, or -1"),
        ((RAW, 1, 1, 8, SCRATCH), "config: -1 for 8 tokens, expected one of 8...64"),
        ((RAW, 1, 1, 64, 4), "config: 4 for 64 tokens, expected one of 64...64"),
        ((RAW, 1, 1, 64, 2), "config: 2 for 64 tokens, expected one of 64...64"),
        ((RAW, 1, 1, 128, 3), "config: 3 for 128 tokens, expected one of more than 64"),
    ],
)
def test_entries_that_cant_be(gpu: str, entry: tuple[int, ...], message: str) -> None:
    native.set_tuned(gpu, [(RAW, 1, 1, 8, 1)])
    with pytest.raises(native.Error, match="^" + message.replace(".", r"\.")):
        native.set_tuned(gpu, [entry])
    assert native.tuned(gpu) == [(RAW, 1, 1, 8, 1)], "a table that is refused changes nothing"


def test_no_table_for_no_name() -> None:
    with pytest.raises(native.Error, match="gpu: an empty name"):
        native.set_tuned("", [(RAW, 1, 1, 8, 1)])


def test_calls_meanwhile_see_a_whole_table(gpu: str) -> None:
    tables = [[(RAW, n, 64, 128, config) for n in range(1, 65)] for config in (4, 5)]
    native.set_tuned(gpu, tables[0])
    done = threading.Event()
    seen = set()

    def read() -> None:
        while not done.is_set():
            seen.add(tuple(e[4] for e in native.tuned(gpu)))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(200):
        native.set_tuned(gpu, tables[turn % 2])
    done.set()
    reader.join()
    assert seen <= {(4,) * 64, (5,) * 64}
