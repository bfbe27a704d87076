"""Descriptors against the worked examples of the PTX ISA (9.7.15.5.1.2), fragments against its figures, products."""

from fractions import Fraction

import numpy as np
import pytest
from ptxsim import fragments, wgmma
from ptxsim_layouts import descriptor, flat, flatten, swizzled

# major, element bytes, exact layout (shape, stride) over (mn, k), swizzle bits, encoded LBO and SBO, descriptor mode
WORKED_EXAMPLES = {
    "K-major, no swizzling, tf32": ("K", 4, (((8, 2), (4, 4)), ((4, 32), (1, 64))), 0, 16, 8, 0),
    "K-major, 32B swizzling, tf32": ("K", 4, (((8, 2), (4, 4)), ((8, 64), (1, 4))), 1, 1, 16, 3),
    "MN-major, no swizzling, bf16": ("MN", 2, (((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128))), 0, 16, 8, 0),
    "MN-major, 32B swizzling, bf16": ("MN", 2, (((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256))), 1, 16, 32, 3),
    "MN-major, 64B swizzling, bf16": ("MN", 2, (((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512))), 2, 32, 64, 2),
}


def check_layout(major, size, layout, bits, leading, stride, mode):
    (shape_mn, shape_k), (stride_mn, stride_k) = layout
    rows, columns = int(np.prod(flatten(shape_mn))), int(np.prod(flatten(shape_k)))
    decoded = wgmma.decode_descriptor(descriptor(leading, stride, mode))
    addresses = wgmma.element_addresses(decoded, rows, major == "MN", columns, size)
    for mn in range(rows):
        for k in range(columns):
            element = flat(shape_mn, stride_mn, mn) + flat(shape_k, stride_k, k)
            assert addresses[mn, k] == swizzled(bits, element, size), (mn, k)


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_worked_examples(name):
    check_layout(*WORKED_EXAMPLES[name])


# The table of canonical layouts: swizzle bits and mode → (mn, k) shapes and strides in elements. T elements: 16 bytes,
# S and L the stride and leading offsets; m = k = 2 repeats.
T, S, L = 8, 4096, 16384
CANONICAL = [
    ("MN", 0, 0, (((T, 1, 2), (8, 2)), ((1, T, S), (T, L)))),
    ("MN", 1, 3, (((T, 2, 2), (8, 2)), ((1, T, L), (2 * T, S)))),
    ("MN", 2, 2, (((T, 4, 2), (8, 2)), ((1, T, L), (4 * T, S)))),
    ("MN", 3, 1, (((T, 8, 2), (8, 2)), ((1, T, L), (8 * T, S)))),
    ("K", 0, 0, (((8, 2), (T, 2)), ((T, S), (1, L)))),
    ("K", 1, 3, (((8, 2), (T, 2)), ((2 * T, S), (1, T)))),
    ("K", 2, 2, (((8, 2), (T, 2)), ((4 * T, S), (1, T)))),
    ("K", 3, 1, (((8, 2), (T, 2)), ((8 * T, S), (1, T)))),
]


@pytest.mark.parametrize("major, bits, mode, layout", CANONICAL)
def test_canonical_layouts(major, bits, mode, layout):
    check_layout(major, 2, layout, bits, L * 2 >> 4, S * 2 >> 4, mode)


def test_a_k_step_is_32_bytes_inside_a_swizzled_row():
    tile = wgmma.element_addresses(wgmma.decode_descriptor(descriptor(1, 64, 1, 2048)), 64, False, columns=64)
    for step in range(4):
        one = wgmma.decode_descriptor(descriptor(1, 64, 1, 2048 + 32 * step))
        assert (wgmma.element_addresses(one, 64, False) == tile[:, 16 * step : 16 * step + 16]).all()


def test_descriptor_fields():
    d = wgmma.decode_descriptor((0x12340 >> 4) | (0x5670 >> 4) << 16 | (0x89A0 >> 4) << 32 | 2 << 62 | 0x3 << 14)
    assert (d.start, d.leading, d.stride, d.mode) == (0x12340, 0x5670, 0x89A0, 2) and d.swizzle_bytes == 64
    with pytest.raises(wgmma.DescriptorError, match="base offset 5"):
        wgmma.decode_descriptor(5 << 49)


# ------------------------------------------------------------------------------------------------------------ fragments

# Entries read off the ISA's figures: (warp, lane, register[, half]) → (row, column).
FIGURE_D = {
    (0, 0, 0): (0, 0),
    (0, 0, 1): (0, 1),
    (0, 0, 2): (8, 0),
    (0, 1, 0): (0, 2),
    (0, 4, 0): (1, 0),
    (0, 31, 3): (15, 7),
    (0, 0, 4): (0, 8),
    (1, 0, 0): (16, 0),
    (3, 31, 3): (63, 7),
    (3, 31, 7): (63, 15),
}
FIGURE_A = {
    (0, 0, 0, 0): (0, 0),
    (0, 0, 0, 1): (0, 1),
    (0, 0, 1, 0): (8, 0),
    (0, 0, 2, 0): (0, 8),
    (0, 0, 3, 1): (8, 9),
    (0, 3, 0, 0): (0, 6),
    (2, 28, 3, 0): (32 + 15, 8),
    (3, 31, 3, 1): (63, 15),
}


def test_fragments_of_the_figures():
    row, column = fragments.accumulator(16)
    for (warp, lane, register), place in FIGURE_D.items():
        assert (16 * warp + row[register, lane], column[register, lane]) == place
    row, column = fragments.operand_a()
    for (warp, lane, register, half), place in FIGURE_A.items():
        assert (16 * warp + row[register, half, lane], column[register, half, lane]) == place


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_accumulator_as_nested_strides(n):
    """The same map as ((4, 8, 4), (2, 2, n/8)) : ((128, 1, 16), (64, 8, 512)) over column-major 64 × n."""
    row, column = fragments.accumulator(n)
    for thread in (0, 1, 5, 31, 32, 77, 127):
        for register in range(n // 2):
            place = flat((4, 8, 4), (128, 1, 16), thread) + flat((2, 2, n // 8), (64, 8, 512), register)
            lane = thread % 32
            assert place == 64 * column[register, lane] + row[register, lane] + 16 * (thread // 32)
    assert len(set(zip(row.flat, column.flat, strict=True))) == 16 * n


def test_mma_operands_by_the_formulas_of_the_isa():
    for lane in range(32):
        group, in_group = lane >> 2, lane % 4
        row, column = fragments.operand_a()
        for i in range(8):
            expected_row = group if i < 2 or 4 <= i < 6 else group + 8
            expected_column = in_group * 2 + (i & 1) + (8 if i >= 4 else 0)
            assert (row[i // 2, i % 2, lane], column[i // 2, i % 2, lane]) == (expected_row, expected_column)
        k, n = fragments.operand_b()
        for i in range(4):
            expected_k = in_group * 2 + (i & 1) + (8 if i >= 2 else 0)
            assert (k[i // 2, i % 2, lane], n[i // 2, i % 2, lane]) == (expected_k, group)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_registers(count, transposed):
    matrices = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    registers = fragments.matrices_to_registers(matrices, transposed)
    for q in range(count):
        for lane in range(32):  # lane l holds row l/4, the elements 2(l%4) and 2(l%4)+1
            r, c = lane // 4, 2 * (lane % 4)
            low, high = (matrices[q, c, r], matrices[q, c + 1, r]) if transposed else matrices[q, r, c : c + 2]
            assert registers[q, lane] == int(low) | int(high) << 16
    assert (fragments.registers_to_matrices(registers, transposed) == matrices).all()


# ------------------------------------------------------------------------------------------------------------- products


def truncated_sum(a, b, c) -> np.float32:
    """One output by the model's definition, with fractions."""
    exponent = lambda x: np.frexp(x)[1] - 1  # noqa: E731
    terms = [(Fraction(x) * Fraction(y), exponent(x) + exponent(y)) for x, y in zip(a, b, strict=True) if x * y]
    terms += [(Fraction(c), exponent(c))] if c else []
    if not terms:
        return np.float32(0)
    unit = Fraction(2) ** (int(max(e for _, e in terms)) - 25)
    total = sum(int(value / unit) for value, _ in terms) * unit
    near = np.float32(float(total))
    return np.nextafter(near, np.float32(0)) if abs(Fraction(float(near))) > abs(total) else near


def bfloats(shape, rng, spread=6):
    values = (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, shape)).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("seed", range(3))
def test_products_are_cut_as_the_model_says(seed):
    rng = np.random.default_rng(seed)
    a, b = bfloats((16, 16), rng), bfloats((8, 16), rng)
    c = rng.standard_normal((16, 8)).astype(np.float32).astype(np.float64)
    got = wgmma.multiply(a, b, c)
    for m in range(16):
        for n in range(8):
            assert got[m, n] == truncated_sum(a[m], b[n], c[m, n])
    assert np.abs(got - (a @ b.T + c)).max() <= 2.0**-20 * (np.abs(a) @ np.abs(b).T + np.abs(c)).max()


def test_products_of_special_numbers():
    a, b, c = np.zeros((4, 16)), np.zeros((2, 16)), np.zeros((4, 2))
    a[0, 0], a[1, 0], a[2, 0], b[0, 0] = np.inf, np.nan, 2.0**-126, 1.0
    c[3] = -np.inf
    got = wgmma.multiply(a, b, c)
    assert got[0, 0] == np.inf and np.isnan(got[0, 1]) and np.isnan(got[1]).all()
    assert got[2].tolist() == [2.0**-126, 0] and (got[3] == -np.inf).all()
