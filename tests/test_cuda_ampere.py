"""Kernels on GPUs before Hopper: other copies to shared memory, other stores of tiles, less shared memory. What reads
packed matrices runs as sm_80 in the slow tests of each kernel; these are a few of each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cuda_reading import ANY, NAN, Loaded, layout_number, pack
from native_module import native
from ptxsim.device import LEAST_SHARED_PER_CTA, SimulatedDevice
from reference_cases import content
from samples import LAYOUTS, assert_same_bits, assert_same_bytes, weight

import unweight_ext as u

AMPERE = "sm_80"


@pytest.fixture(autouse=True, scope="module")
def ampere() -> Iterator[None]:
    usual, SimulatedDevice.architecture = SimulatedDevice.architecture, AMPERE
    yield
    SimulatedDevice.architecture = usual


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("known", [True, False])
def test_unpack(layout: str, known: bool) -> None:
    """Tails of rows and columns, patches, stages that are raw among others, several in flight."""
    name = "any bits" if layout == "raw" else "few outsiders"
    expected = weight(name, 70, 650)
    packed = pack(expected, layout)
    for seed in range(2):
        loaded = Loaded(packed, 650, layout=layout_number(layout) if known else ANY, seed=seed)
        assert_same_bits(loaded.unpack(), expected)


@pytest.mark.parametrize("layout", ["huffman", "nibble"])
def test_patches_and_raw_stages(layout: str) -> None:
    bits = content("half noise" if layout == "huffman" else "some noise", (64, 640), seed=1)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    packed = u.packed.pack_quietly(expected, layout)
    assert_same_bits(Loaded(packed, 640, seed=2).unpack(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding(layout: str) -> None:
    expected = weight("any bits" if layout == "raw" else "few outsiders", 130, 301)
    loaded = Loaded(pack(expected, layout), 301, seed=3)
    rows = loaded.embedding([129, 0, 64, 130])
    assert_same_bits(rows[:3], expected[[129, 0, 64]])
    assert (rows[3].view(torch.int16) == NAN).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_told_as_on_a_cpu(layout: str) -> None:
    packed = pack(weight("any bits" if layout == "raw" else "trained", 70, 140), layout)
    flat = packed.view(-1)
    used, data = (int(flat[at : at + 8].view(torch.int64)) for at in (40, 64))
    for at in (data + 100, used - 17):
        flat[at] ^= 0x10
        with pytest.raises(RuntimeError) as on_cpu:
            torch.ops.unweight._verify(packed)
        with pytest.raises(native.Error) as on_device:
            Loaded(packed, 140).verify()
        assert str(on_device.value) == str(on_cpu.value)
        flat[at] ^= 0x10
    Loaded(packed, 140).verify()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_bytes_are_safe(layout: str) -> None:
    packed = pack(weight("any bits" if layout == "raw" else "few outsiders", 66, 260), layout)
    flat, rng = packed.view(-1), np.random.default_rng(layout_number(layout))
    data = int(flat[64:72].view(torch.int64))
    sound = flat.clone()
    for _ in range(3):
        at = torch.from_numpy(rng.integers(data, len(flat), 40))
        flat[at] = torch.from_numpy(rng.integers(0, 256, 40, np.uint8))
        with pytest.raises(native.Error):
            Loaded(packed, 260).unpack()
        flat.copy_(sound)


@pytest.mark.parametrize("target", LAYOUTS[:3])
def test_transcode(target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", u.LayoutFallback)
        packed = u.pack(weight("few outsiders", 65, 130), "archive")
        expected = u.transcode(packed, target)
    device = SimulatedDevice()
    address = device.tensor(packed, "packed")
    _, row_bytes, out = native.transcode(
        device, address, packed.numel(), 1, 65, 130, layout_number(target), False, 1 << 20
    )
    assert_same_bytes(torch.from_numpy(device.read(out, np.uint8, (65, row_bytes)).copy()), expected)


def test_a_launch_that_only_hopper_has_room_for_is_refused() -> None:
    """Else the tests above would prove nothing of the plans."""
    device = SimulatedDevice()
    argument = bytes(
        native.plan_unpack(
            Loaded(pack(weight("trained", 64, 128), "nibble"), 128).packed, native.RowRange(0, 64), 0, 0, 0
        )[0].argument
    )
    with pytest.raises(AssertionError, match=f"at most {LEAST_SHARED_PER_CTA}"):
        device.launch("unweight_unpack_nibble", 1, 160, LEAST_SHARED_PER_CTA + 16, argument)
