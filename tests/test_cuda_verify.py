"""verify on the device: whatever bit is flipped is found, and told as the CPU tells it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_reading import Loaded, layout_number, pack
from native_module import native
from reference_cases import seal
from samples import LAYOUTS, weight
from torch import Tensor

pytestmark = pytest.mark.usefixtures("every_architecture")
CONTENT = {"raw": "any bits", "huffman": "trained", "nibble": "zero rows", "archive": "trained"}


def packed_of(layout: str, rows: int = 130, columns: int = 140) -> Tensor:
    return pack(weight(CONTENT[layout], rows, columns), layout)


def cpu_says(packed: Tensor) -> str:
    with pytest.raises(RuntimeError) as error:
        torch.ops.unweight._verify(packed)
    return str(error.value)


def part(packed: Tensor, name: str) -> int:
    """A byte of a part of the matrix."""
    flat = packed.numpy().reshape(-1)
    used, index, sums, data = (int(x) for x in flat[40:72].view("<u8"))
    return {"code": 170, "index": index + 5, "checksums": sums + 3, "data": data + 100, "end": used - 17}[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sound_passes(layout: str) -> None:
    packed = packed_of(layout)
    Loaded(packed, 140).verify()
    known = Loaded(packed, 140, layout=layout_number(layout), seed=3)
    known.verify()
    assert "unweight_verify_header" in known.device.launched


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["index", "checksums", "data", "end", "code"])
def test_a_changed_byte(layout: str, name: str) -> None:
    if name == "code" and layout in ("raw", "nibble"):
        name = "index"
    packed = packed_of(layout)
    at = part(packed, name)
    packed.view(-1)[at] ^= 0x10
    expected = cpu_says(packed)
    with pytest.raises(native.Error) as error:
        Loaded(packed, 140).verify()
    assert str(error.value) == expected


@pytest.mark.parametrize("at", [0, 8, 10, 11, 12, 13, 14, 15, 16, 24, 32, 40, 48, 56, 64, 80, 88, 96, 100, 110])
def test_header_fields_are_told_as_on_a_cpu(at: int) -> None:
    packed = packed_of("nibble")
    packed.view(-1)[at] ^= 0x21
    with pytest.raises(native.Error) as error:
        Loaded(packed, 140).verify()
    said = str(error.value)
    if at == 24:
        assert said.startswith("packed_w: its shape says 130 out_features, its header ")
    elif at == 32:
        assert said.startswith("in_features: 140, expected ")
    else:
        assert said == cpu_says(packed)


def test_the_code_is_that_of_its_id() -> None:
    packed = packed_of("huffman")
    packed.view(-1)[72] ^= 1
    seal(packed.numpy())
    with pytest.raises(native.Error) as error:
        Loaded(packed, 140).verify()
    assert str(error.value) == cpu_says(packed)


@pytest.mark.parametrize("where", ["gap", "padding", "last byte"])
def test_gaps_and_padding_are_zero(where: str) -> None:
    from unweight_ext.packed import pad_row_bytes

    sound = packed_of("nibble")
    packed = pad_row_bytes(sound, sound.shape[1] + 3)
    flat = packed.view(-1)
    at = {"gap": int(flat.numpy()[64:72].view("<u8")[0]) - 1, "padding": -77, "last byte": -1}[where]
    flat[at] = 9
    seal(packed.numpy())
    with pytest.raises(native.Error) as error:
        Loaded(packed, 140).verify()
    assert str(error.value) == cpu_says(packed)


def test_more_bytes_than_the_index_knows_are_told() -> None:
    """They would be in no checksum."""
    from unweight_ext.packed import pad_row_bytes

    sound = packed_of("nibble")
    packed = pad_row_bytes(sound, sound.shape[1] + 1)
    packed.view(-1)[40:48].view(torch.int64)[0] += 16
    seal(packed.numpy())
    with pytest.raises(native.Error) as error:
        Loaded(packed, 140).verify()
    assert str(error.value) == cpu_says(packed) and "the index says" in str(error.value)


def test_chunks_outside_the_data_are_told() -> None:
    packed = packed_of("archive", 65, 16384)  # of two chunks
    flat = packed.numpy().reshape(-1)
    index = int(flat[48:56].view("<u8")[0])
    flat[index + 4 : index + 8].view("<u4")[0] = 0x0FFFFFFF
    seal(packed.numpy())
    with pytest.raises(native.Error) as error:
        Loaded(packed, 16384).verify()
    assert str(error.value) == cpu_says(packed)


def test_the_first_matrix_that_is_damaged_is_told() -> None:
    weights = torch.stack([weight("trained", 64, 256, seed) for seed in range(4)])
    packed = pack(weights, "huffman", stacked=True)
    for matrix in (3, 1):
        packed[matrix].view(-1)[-700] ^= 1
    for seed in range(3):
        loaded = Loaded(packed, 256, seed=seed)
        with pytest.raises(native.Error, match="checksum"):
            loaded.verify()
        assert loaded.damage()[1] == 1


def test_a_status_is_the_smallest_key() -> None:
    """Whatever the order of reports: an earlier matrix, then the flaw that explains others, then the earlier place."""
    assert native.read_status(0) == (0, 0, 0)
    keys = [(matrix, flaw, place) for matrix in (0, 5) for flaw in (1, 5, 13) for place in (0, 7, (1 << 40) - 1)]
    words = [(1 << 64) - 1 - (matrix << 44 | flaw << 40 | place) for matrix, flaw, place in keys]
    assert words == sorted(words, reverse=True)
    assert [native.read_status(word) for word in words] == [(flaw, matrix, place) for matrix, flaw, place in keys]


def test_headers_of_large_matrices_are_shared_by_ctas() -> None:
    few = native.PackedMatrices(256, 1 << 20, 64, 128, 3)
    assert native.plan_verify_headers(few, 256, 256).grid == 3
    many = native.PackedMatrices(1 << 40, 1 << 34, 1 << 17, 1 << 16, 1, layout=layout_number("huffman"))
    assert native.plan_verify_headers(many, 256, 256).grid == 64


def test_more_matrices_than_a_grid_has_ctas_are_refused() -> None:
    """Of headers that several CTAs share, the product would also overflow 32 bits."""
    small = native.PackedMatrices(256, 128, 1, 1, 1 << 31)
    shared = native.PackedMatrices(256, 1 << 34, 1 << 17, 1 << 16, 1 << 26, layout=layout_number("huffman"))
    for plan, matrices in (
        (native.plan_verify_headers, small),
        (native.plan_verify_headers, shared),
        (native.plan_compare_checksums, small),
    ):
        with pytest.raises(native.Error, match="^packed: .* units of work, allowed are 2"):
            plan(matrices, 256, 256)


def test_a_header_over_several_ctas() -> None:
    """As that of a matrix with thousands of stages is: the plan of a small one, made for three CTAs."""
    packed = packed_of("nibble", 200, 1100)
    loaded = Loaded(packed, 1100)
    sums = loaded.device.tensor(np.zeros(native.sums_bytes(loaded.packed) // 8, np.uint64), "sums", readonly=False)
    plan = native.plan_verify_headers(loaded.packed, sums, loaded.status)
    ctas_at = len(plan.argument) - 8
    assert plan.argument[ctas_at:] == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    argument = plan.argument[:ctas_at] + bytes([3, 0, 0, 0, 0, 0, 0, 0])
    loaded.device.launch(plan.kernel, 3, plan.block, plan.shared_bytes, argument)
    assert loaded.damage() == (0, 0, 0)
    assert loaded.device.read(sums, np.uint64, (1,))[0] == packed.numpy().reshape(-1)[16:24].view("<u8")[0]
