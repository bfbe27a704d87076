"""The compiled codec gives the bytes of the specification that runs, unweight_ext/reference.py, with every CPU code."""

import warnings

import numpy as np
import pytest
import torch
from capability import CAPABILITIES, capability
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import CONTENTS, LAYOUTS, SHAPES, assert_same_bytes, bits

import unweight_ext as u
from unweight_ext import reference

# Edges of the tiles, of segments (1024 columns and up), of archive chunks (2^20 weights), and streams of one code.
MORE_SHAPES = ((1, 128), (1, 129), (64, 1), (129, 255), (65, 2100), (3, 9000))
LARGE = ((2050, 520), (4160, 130))


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def check(array: np.ndarray, layout: str, stacked: bool = False) -> None:
    """Same bytes from both, and each reads what the other wrote."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        packed = u.pack(as_tensor(array), layout, stacked=stacked)
    expected = reference.pack(array, layout)
    assert_same_bytes(packed, torch.from_numpy(expected), (array.shape, layout))
    assert np.array_equal(reference.unpack(packed.numpy()), array)
    unpacked = u.unpack(torch.from_numpy(expected)).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(unpacked, array)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES, ids=str)
def test_edge_shapes(shape, layout, level):
    contents = CONTENTS if np.prod(shape) < 20_000 else ("trained", "few outsiders", "one bad stage")
    with capability(level):
        for content in contents:
            check(bits(content, *shape), layout)


@pytest.mark.slow
@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_shapes(shape, layout, level):
    with capability(level):
        for content in CONTENTS:
            check(bits(content, *shape), layout)


@pytest.mark.parametrize("level", CAPABILITIES)
def test_several_archive_chunks(level):
    with capability(level):
        check(bits("few outsiders", 2050, 520), "archive")


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=30, deadline=None)
@given(
    content=st.sampled_from(sorted(CONTENTS)),
    n=st.integers(1, 130),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(layout, level, content, n, k, seed):
    with capability(level):
        check(bits(content, n, k, seed), layout)


@st.composite
def hand_made(draw: st.DrawFn) -> np.ndarray:
    """A few exponents with chosen frequencies, patches in chosen places: what random contents rarely hit."""
    n, k = draw(st.integers(1, 70)), draw(st.integers(1, 140))
    exponents = np.array(draw(st.lists(st.integers(0, 255), min_size=1, max_size=20)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # From even to very uneven: code lengths up to the limit and past it.
    odds = np.float64(draw(st.sampled_from([1.0, 0.7, 0.5, 0.3]))) ** np.arange(len(exponents))
    array = rng.choice(exponents, (n, k), p=odds / odds.sum()).astype(np.uint16) << 7
    if draw(st.booleans()):
        array |= rng.integers(0, 128, (n, k), np.uint16) | rng.integers(0, 2, (n, k), np.uint16) << 15
    spots = st.tuples(st.integers(0, n - 1), st.integers(0, k - 1), st.integers(0, 65535))
    for row, column, value in draw(st.lists(spots, max_size=10)):
        array[row, column] = value
    return array


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=50, deadline=None)
@given(array=hand_made())
def test_hand_made_contents(layout, level, array):
    with capability(level):
        check(array, layout)


@pytest.mark.parametrize("level", CAPABILITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacked(layout, level):
    for shape in ((1, 1, 1), (3, 5, 7), (2, 64, 128), (3, 65, 257)):
        for contents in (("trained", "trained", "zero rows"), ("trained", "any bits", "few outsiders")):
            array = np.stack([bits(contents[e], *shape[1:], seed=e) for e in range(shape[0])])
            with capability(level):
                check(array, layout, stacked=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_original_shape_is_in_the_header(layout):
    array = bits("trained", 5, 24).reshape(5, 2, 3, 4)
    packed = u.pack(as_tensor(array), layout)
    expected = reference.pack(array.reshape(5, 24), layout, shape=(5, 2, 3, 4))
    assert_same_bytes(packed, torch.from_numpy(expected))
