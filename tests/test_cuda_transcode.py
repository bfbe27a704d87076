"""Transcoding kernels on the interpreter: the same bytes as on a CPU."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from capability import capability
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_module import native
from ptxsim.device import SimulatedDevice
from reference_cases import CONTENTS, LAYOUTS, content, seal, stages_of
from samples import assert_same_bytes
from torch import Tensor

import unweight_ext as u

pytestmark = pytest.mark.usefixtures("every_architecture")
TARGETS = ("raw", "huffman", "nibble")
MEGABYTES = 1 << 20


def pack(array: np.ndarray, layout: str) -> Tensor:
    """[N, K] or, as a stack, [E, N, K] of BF16 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        return u.pack(torch.from_numpy(array.view(np.int16)).view(torch.bfloat16), layout, stacked=array.ndim == 3)


def on_cpu(packed: Tensor, target: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        return u.transcode(packed, target)


def on_device(
    packed: Tensor,
    in_features: int,
    target: str,
    *,
    seed: int = 0,
    scratch_bytes: int = 64 * MEGABYTES,
    device: SimulatedDevice | None = None,
) -> Tensor:
    device = device or SimulatedDevice(seed=seed)
    *matrices, n, row_bytes = packed.shape
    layout, new_row_bytes, out = native.transcode(
        device,
        device.tensor(packed, "packed"),
        n * row_bytes,
        matrices[0] if matrices else 1,
        n,
        in_features,
        LAYOUTS.index(target),
        bool(matrices),
        scratch_bytes,
    )
    shape = (*packed.shape[:-1], new_row_bytes)
    transcoded = torch.from_numpy(device.read(out, np.uint8, shape).copy())
    assert u.info(transcoded).layout == LAYOUTS[layout]
    return transcoded


def check(array: np.ndarray, target: str, source: str = "archive", **options) -> Tensor:
    """Under two orders of warps, unless a seed or a device is given."""
    packed = pack(array, source)
    expected = on_cpu(packed, target)
    for chosen in [options] if options.keys() & {"seed", "device"} else [options, options | {"seed": 1}]:
        got = on_device(packed, array.shape[-1], target, **chosen)
        assert_same_bytes(got, expected, (array.shape, source, target))
    return got


def layout_of(packed: Tensor) -> str:
    return u.info(packed).layout


# Rows of 16-byte pieces and rows of odd length; a tail in N and K each.
SMALL = ((20, 136), (17, 131))
# What is nibble and what isn't for different reasons; the rest is for the slow tests.
BY_TARGET = {
    "huffman": ("trained", "zeros", "pruned", "few outsiders", "subnormals", "stripes", "specials", "some noise"),
    "nibble": ("trained", "zeros", "zero rows", "pruned", "patched", "narrow", "specials", "one special"),
}
CASES = [(name, target) for target, names in BY_TARGET.items() for name in names]


@pytest.mark.parametrize("name, target, shape", [(*case, SMALL[i % 2]) for i, case in enumerate(CASES)], ids=str)
def test_contents(name, target, shape):
    check(content(name, shape), target)


@pytest.mark.parametrize("source, target", list(itertools.product(LAYOUTS, TARGETS)))
def test_every_pair_of_layouts(source, target):
    assert layout_of(check(content("trained", (5, 40)), target, source)) == target


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (64, 128), (65, 130)], ids=str)
def test_shapes(shape, target):
    check(content("few outsiders", shape), target)


def test_raw_stages():
    """Before all others, where streams can't start yet, and between others."""
    for name in ("one bad stage", "half noise"):
        packed = check(content(name, (64, 384)), "huffman", "raw")
        assert layout_of(packed) == "huffman"
        raw = [stage[1] >> 6 for stage in stages_of(packed.numpy())]
        assert raw == ([1, 0, 0] if name == "one bad stage" else [0, 1, 0])


def test_segments():
    check(content("few outsiders", (3, 2100)), "huffman")


class Recorder(SimulatedDevice):
    """Knows how much was allocated by which name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def allocate(self, nbytes: int, name: str) -> int:
        self.bytes[name] = self.bytes.get(name, 0) + nbytes
        return super().allocate(nbytes, name)


def test_bands():
    """As many rows at once as there is scratch for, and never more."""
    array = content("zero rows", (2, 70, 40))
    for rows, bands in ((64, 4), (140, 1)):
        device = Recorder()
        check(array, "huffman", "nibble", scratch_bytes=rows * 40 * 2, device=device)
        assert device.bytes["decoded rows"] == rows * 40 * 2
        assert device.launched.count("unweight_size_huffman") == bands
        # What stays in scratch isn't decoded again.
        assert sum(name.startswith("unweight_unpack") for name in device.launched) == (1 if bands == 1 else 3 * bands)


def test_how_stacks_are_cut():
    assert native.cut_bands(3, 100, 10, 64, 10**6) == [(0, 3, 0, 100)]
    assert native.cut_bands(3, 100, 10, 64, 2999) == [(0, 2, 0, 100), (2, 1, 0, 100)]
    assert native.cut_bands(2, 100, 10, 64, 999) == [(0, 1, 0, 64), (0, 1, 64, 36), (1, 1, 0, 64), (1, 1, 64, 36)]
    # A group at least.
    assert native.cut_bands(1, 200, 10, 64, 1) == [(0, 1, 0, 64), (0, 1, 64, 64), (0, 1, 128, 64), (0, 1, 192, 8)]
    huge = native.cut_bands(1, 2**20, 2**13, 128, 2**25)
    assert len(huge) == 256 and huge[-1] == (0, 1, 2**20 - 4096, 4096)


@pytest.mark.parametrize("target", TARGETS)
def test_stacks(target):
    """One code and one base for all; a matrix too large for the layout takes the others with it."""
    check(np.stack([content("trained", (17, 136)), content("zero rows", (17, 136))]), target)
    outsiders = np.stack([content("trained", (5, 40)), content("stripes", (5, 40))])
    assert layout_of(check(outsiders, target)) == ("huffman" if target == "nibble" else target)


def test_fallbacks():
    few = content("trained", (30, 128))
    few[29, 127] = 0x8001  # one subnormal is enough
    assert layout_of(check(few, "nibble")) == "huffman"
    assert layout_of(check(content("huge", (30, 128)), "nibble")) == "huffman"
    assert layout_of(check(content("any bits", (64, 128)), "nibble")) == "raw"


@pytest.mark.parametrize("scaled, layout", [(0, "huffman"), (1, "nibble"), (190, "nibble"), (191, "huffman")])
def test_how_far_exponents_can_be_scaled(scaled, layout):
    """One exponent outside the window, at the ends of what can be stored as a patch."""
    base = 125 if scaled < 100 else 40
    array = (np.arange(64 * 128).reshape(64, 128) % 16 + base << 7).astype(np.uint16)
    array[5, 77] = scaled + base - 112 << 7
    assert layout_of(check(array, "nibble")) == layout


@pytest.mark.parametrize("complete_halves", [False, True])
@pytest.mark.parametrize("shape", [(1, 130000), (3, 5)], ids=str)
def test_counts(shape, complete_halves):
    """By one CTA: in rounds, since its counters have 16 bits. In the first one, all pairs are the same."""
    array = content("narrow", shape)
    array.reshape(-1)[:124000] = 0x3F80
    if shape == (3, 5):
        array[:, -1] = [0x7F80, 0x3F80, 0x0000]
    device = SimulatedDevice(multiprocessors=1)
    got = native.count_pairs(device, device.tensor(array, "weights"), *shape, complete_halves)
    exponents = array >> 7 & 255
    if shape[1] % 2:
        last = exponents[:, -1:]
        exponents = np.hstack([exponents, last * (complete_halves & (last != 255))])
    expected = np.bincount((exponents[:, ::2] + 256 * exponents[:, 1::2]).reshape(-1), minlength=65536)
    assert got == expected.tolist()


@pytest.mark.parametrize("columns", [256, 255])
def test_counts_of_exponents_that_have_no_counter(columns):
    """Only some rounds have such pairs: of weights from 2^65 on, with infinities and NaN."""
    array = content("narrow", (520, columns))
    rng = np.random.default_rng(0)
    rows = slice(480, 520)  # in the second round
    array[rows] = rng.choice([190, 191, 192, 193, 255], array[rows].shape).astype(np.uint16) << 7
    device = SimulatedDevice(multiprocessors=2)
    got = native.count_pairs(device, device.tensor(array, "weights"), *array.shape, False)
    exponents = array >> 7 & 255
    if columns % 2:
        exponents = np.hstack([exponents, np.zeros_like(exponents[:, -1:])])
    expected = np.bincount((exponents[:, ::2] + 256 * exponents[:, 1::2]).reshape(-1), minlength=65536)
    assert got == expected.tolist()


@pytest.mark.parametrize("shape", [(64, 128), (64, 127)], ids=str)
@pytest.mark.parametrize("target", ["huffman", "nibble"])
def test_registers_are_read_without_bank_conflicts(shape, target):
    device = SimulatedDevice()
    check(content("patched", shape), target, "raw", device=device)
    tiles = [t for (file, _), t in device.machine.counters.shared.items() if file.endswith("tile.cuh")]
    assert sum(t.wavefronts for t in tiles) == sum(t.least for t in tiles) > 0


def test_zero_rows_beside_patches():
    """Their mask stands before the patches."""
    array = content("trained", (20, 136))
    array[[0, 7, 8, 19]] = 0
    array[2, ::40] = 0x7F81
    got = check(array, "nibble")
    assert layout_of(got) == "nibble" and u.info(got).patches == 4


def full_of_patches(count: int) -> np.ndarray:
    """[64, 256]: in the first stage, warp 0 has `count` pairs that occur once beside 256 that are frequent."""
    frequent = np.array([(a, b) for a in range(100, 116) for b in range(100, 116)], np.uint16).reshape(-1, 2)
    array = np.resize(frequent, (64 * 128, 2)).reshape(64, 256) << 7
    rare = np.array([(a, b) for a in range(60, 80) for b in range(90, 99)], np.uint16)[:count]
    # K-step by k-step, so that the first one is full.
    for i, pair in enumerate(rare):
        row, column = i % 128 // 8, i // 128 * 112 + i % 8 * 2
        array[row, column : column + 2] = pair << 7
    return array


@pytest.mark.parametrize("count", [128, 129])
def test_a_warp_full_of_patches(count):
    """128 is what a stage can hold; with one more the huffman stage is raw, and the matrix isn't nibble."""
    # A second half without any, so that there aren't too many in the whole matrix.
    array = np.hstack([full_of_patches(count), full_of_patches(0)])
    got = check(array, "huffman")
    assert u.info(got).patches == (128 if count == 128 else 0)
    got = check(array, "nibble")
    assert (layout_of(got), u.info(got).patches) == (("nibble", 128) if count == 128 else ("huffman", 0))


def test_archives_are_written_on_a_cpu():
    packed = pack(content("trained", (5, 8)), "nibble")
    with pytest.raises(native.Error, match="layout: archive is not written on a GPU, allowed are raw, huffman, nibble"):
        on_device(packed, 8, "archive")


def test_matrices_of_different_layouts():
    array = content("trained", (64, 128))
    matrices = [pack(array, layout).reshape(-1) for layout in ("huffman", "nibble")]
    size = -(-max(m.numel() for m in matrices) // 128) * 128
    stack = torch.stack([torch.nn.functional.pad(m, (0, size - m.numel())) for m in matrices]).view(2, 64, -1)
    with pytest.raises(ValueError, match="matrix 1 is nibble") as cpu:
        u.transcode(stack, "raw")
    with pytest.raises(native.Error) as device:
        on_device(stack, 128, "raw")
    assert str(device.value) == str(cpu.value)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Tensor, str, bool]:
    """Packed bytes with some changed, and whether the checksums were made right again."""
    array = content("few outsiders", (draw(st.sampled_from([5, 65])), draw(st.sampled_from([8, 131]))))
    packed = pack(array, draw(st.sampled_from(LAYOUTS))).numpy().copy()
    flat = packed.reshape(-1)
    places = st.integers(0, flat.size - 1) | st.integers(0, min(400, flat.size - 1))
    for _ in range(draw(st.integers(1, 4))):
        flat[draw(places)] = draw(st.integers(0, 255))
    sealed = draw(st.booleans())
    if sealed:
        seal(packed)
    return torch.from_numpy(packed), draw(st.sampled_from(TARGETS)), array.shape[1]


def same_as_on_cpu(packed: Tensor, target: str, in_features: int) -> None:
    """Either both say that the bytes are damaged, or both give the same. The interpreter reports whatever kernels do
    that they must not."""
    try:
        with capability("portable"):
            expected = on_cpu(packed, target)
    except ValueError:
        with pytest.raises(native.Error):
            on_device(packed, in_features, target)
        return
    assert_same_bytes(on_device(packed, in_features, target), expected)


HOSTILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(HOSTILE, max_examples=20)
@given(damaged())
def test_damaged_bytes(case):
    same_as_on_cpu(*case)


@pytest.mark.slow
@settings(HOSTILE, max_examples=150)
@given(damaged())
def test_more_damaged_bytes(case):
    same_as_on_cpu(*case)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 128), (33, 250), (130, 129), (16, 1048)], ids=str)
@pytest.mark.parametrize("name", CONTENTS)
def test_more_contents_and_seeds(name, shape):
    seed = sorted(CONTENTS).index(name)
    check(content(name, shape, seed), TARGETS[1 + seed % 2], LAYOUTS[seed % 4], seed=seed)


@pytest.mark.slow
def test_several_chunks():
    """An archive of more than one chunk, and scratch for one at a time."""
    check(content("few outsiders", (65, 16384)), "huffman", scratch_bytes=MEGABYTES)
