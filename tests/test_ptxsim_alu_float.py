"""The interpreter's floating-point arithmetic and conversions against fractions, rounded once by the definition."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptxsim.alu_round import decode, encode
from ptxsim_lanes import each, floats, of_type, run, to_number, words

# --------------------------------------------------------------------------------------------------------------- floats

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}


def rounded(exact: Fraction, type_name: str, mode: str = "rn") -> int:
    """Bits of the magnitude and sign of a non-zero fraction in a format, straight from the definition."""
    precision, lowest, highest = FORMATS[type_name]
    negative, magnitude = exact < 0, abs(exact)
    exponent = lowest
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - precision + 1)
    whole, rest = divmod(magnitude, ulp)
    whole = int(whole)
    away = {
        "rn": rest * 2 > ulp or (rest * 2 == ulp and whole & 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    whole += bool(away)
    # The bits of a float count up through its exponents: the integer does the carry.
    bits = whole + ((exponent - lowest) << precision - 1)
    infinity = (highest - lowest + 2) << precision - 1
    if bits >= infinity:
        stays = mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
        bits = infinity - 1 if stays else infinity
    sign = {"f16": 15, "bf16": 15, "f32": 31, "f64": 63}[type_name]
    return bits | negative << sign


def check_float(text: str, type_name: str, sources: list[list[int]], exact, mode: str = "rn") -> None:
    for index, got in enumerate(run(text, *sources)):
        numbers = [to_number(s[index], type_name) for s in sources]
        if not all(map(math.isfinite, numbers)):
            plain = exact(*map(np.float64, numbers))
            if np.isnan(plain):
                assert math.isnan(to_number(got, type_name)), (text, numbers)
            else:
                assert to_number(got, type_name) == plain, (text, numbers)
            continue
        value = exact(*map(Fraction, numbers))
        if value == 0:
            assert to_number(got, type_name) == 0
        else:
            assert got == rounded(value, type_name, mode), (text, numbers)


ARITHMETIC = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_single_precision_arithmetic_is_rounded_once(mode, data):
    with np.errstate(invalid="ignore"):
        for name, (count, exact) in ARITHMETIC.items():
            check_float(f"{name}.{mode}.f32", "f32", [data.draw(floats("f32")) for _ in range(count)], exact, mode)


@pytest.mark.parametrize("type_name", ["f16", "bf16", "f64"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_arithmetic_of_other_formats(type_name, data):
    with np.errstate(all="ignore"):
        for name, (count, exact) in ARITHMETIC.items():
            sources = [data.draw(floats(type_name)) for _ in range(count)]
            check_float(f"{name}.rn.{type_name}", type_name, sources, exact)
            if type_name == "f64":
                continue
            packed = [[x | y << 16 for x, y in each(s, s[::-1])] for s in sources]
            single = run(f"{name}.rn.{type_name}", *sources)
            assert run(f"{name}.rn.{type_name}x2", *packed) == [x | y << 16 for x, y in each(single, single[::-1])]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=20, deadline=None)
@given(floats("f32"), floats("f32"))
def test_division_and_square_root(mode, a, b):
    b = [y if y & 0x7FFFFFFF else 1 for y in b]
    with np.errstate(all="ignore"):
        check_float(f"div.{mode}.f32", "f32", [a, b], lambda x, y: x / y, mode)
        check_float(f"rcp.{mode}.f32", "f32", [b], lambda y: 1 / y, mode)
    for bits, got in each(a, run("sqrt.rn.f32", a)):
        x = to_number(bits, "f32")
        if x > 0 and math.isfinite(x):  # the neighbours' midpoints lie on either side of the root
            root = Fraction(to_number(got, "f32"))
            half = (Fraction(to_number(got + 1, "f32")) - root) / 2
            assert (root - half) ** 2 <= Fraction(x) <= (root + half) ** 2


def test_special_results():
    zero, minus_zero, one, nan, subnormal = 0, 1 << 31, 0x3F800000, 0x7FC12345, 0x00000001
    assert run("add.rm.f32", [one], [one | 1 << 31]) == [minus_zero]
    assert run("add.f32", [one, minus_zero, nan], [one | 1 << 31, minus_zero, one]) == [zero, minus_zero, 0x7FFFFFFF]
    assert run("max.f32", [nan, minus_zero, nan], [one, zero, nan]) == [one, zero, 0x7FFFFFFF]
    assert run("min.f32", [nan, zero], [one, minus_zero]) == [one, minus_zero]
    assert run("max.NaN.f32", [nan], [one]) == [0x7FFFFFFF]
    assert run("add.ftz.f32", [subnormal], [subnormal]) == [0] and run("add.f32", [subnormal], [subnormal]) == [2]
    assert run("add.sat.f32", [one, one | 1 << 31, nan], [one, zero, one]) == [one, 0, 0]
    assert run("fma.rn.relu.bf16", [0xBF80], [0x3F80], [0]) == [0]
    assert run("neg.bf16x2", [0x3F80BF80]) == [0xBF803F80] and run("abs.f32", [minus_zero | one]) == [one]
    assert run("copysign.f32", [minus_zero], [one]) == [one | minus_zero]
    assert run("ex2.approx.ftz.f32", [0x41200000]) == [0x44800000]  # 2^10


# ------------------------------------------------------------------------------------------------------------- converts


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_integers_to_floats(mode, data):
    for source in ("u8", "u32", "s32", "u64", "s64"):
        bits = data.draw(words(int(source[1:])))
        for target in ("f32", "f16", "bf16"):
            expected = [rounded(Fraction(v), target, mode) if (v := of_type(b, source)) else 0 for b in bits]
            assert run(f"cvt.{mode}.{target}.{source}", bits) == expected


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_floats_to_integers(data):
    roundings = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for source in ("f32", "f64", "f16", "bf16"):
        bits = data.draw(floats(source))
        numbers = [to_number(b, source) for b in bits]
        for target in ("u8", "u16", "u32", "s32", "u64", "s64"):
            width = int(target[1:])
            low, high = (-(1 << width - 1), (1 << width - 1) - 1) if target[0] == "s" else (0, (1 << width) - 1)
            for name, whole in roundings.items():

                def expected(x, whole=whole, low=low, high=high, width=width, source=source):
                    if math.isnan(x):
                        return 1 << width - 1 if width == 64 or source == "f64" else 0
                    if math.isinf(x):
                        return (high if x > 0 else low) & (1 << width) - 1
                    return max(low, min(high, whole(x))) & (1 << width) - 1

                assert run(f"cvt.{name}.{target}.{source}", bits) == list(map(expected, numbers))


@settings(max_examples=30, deadline=None)
@given(floats("f32"), floats("f64"), floats("bf16"))
def test_floats_to_floats(single, double, brain):
    for source, bits in (("f32", single), ("f64", double)):
        for target in ("bf16", "f16", "f32"):
            for mode in ("rn", "rz") if source != target else ():
                for b, got in each(bits, run(f"cvt.{mode}.{target}.{source}", bits)):
                    x = to_number(b, source)
                    if math.isfinite(x) and x:
                        assert got == rounded(Fraction(x), target, mode)
                    else:
                        assert to_number(got, target) == x or math.isnan(x)
    assert run("cvt.f32.bf16", brain) == [b << 16 if (b & 0x7FFF) <= 0x7F80 else 0x7FFFFFFF for b in brain]
    low, high = run("cvt.rn.bf16.f32", single), run("cvt.rn.bf16.f32", single[::-1])
    assert run("cvt.rn.bf16x2.f32", single[::-1], single) == [y << 16 | x for x, y in each(low, high)]
    for b, got in each(single, run("cvt.rni.f32.f32", single)):
        x = to_number(b, "f32")
        if math.isfinite(x):
            assert to_number(got, "f32") == round(x)


@settings(max_examples=20, deadline=None)
@given(words(64))
def test_integers_to_integers(a):
    for source in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        values = [of_type(x, source) for x in a]
        for target in ("u8", "u16", "s16", "u32", "s32", "u64", "s64"):
            bits = int(target[1:])
            assert run(f"cvt.{target}.{source}", a) == [v & (1 << bits) - 1 for v in values]
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
            clipped = [max(low, min(high, v)) & (1 << bits) - 1 for v in values]
            assert run(f"cvt.sat.{target}.{source}", a) == clipped


@pytest.mark.parametrize("type_name", ["f16", "bf16", "f32"])
def test_decoding_and_encoding_are_inverse(type_name):
    bits = np.arange(1 << 16, dtype=np.uint64) * np.uint64(1 if type_name != "f32" else 65537)
    with np.errstate(invalid="ignore"):
        values = decode(type_name)(bits)
    numbers = ~np.isnan(values)
    assert (encode(type_name)(values)[numbers] == bits[numbers]).all()
