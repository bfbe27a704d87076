"""The interpreter's integer arithmetic, logic and comparisons against plain Python integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptxsim import alu
from ptxsim_lanes import each, floats, of_type, run, signed, to_number, words


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# ------------------------------------------------------------------------------------------------------------- integers

INTEGER_TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
OF_TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else -1,
    "rem": lambda a, b: a - b * truncated(a, b) if b else a,
}


@pytest.mark.parametrize("type_name", INTEGER_TYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_integer_arithmetic_of_two(type_name, data):
    bits = int(type_name[1:])
    a, b = data.draw(words(bits)), data.draw(words(bits))
    for name, exact in OF_TWO.items():
        expected = [exact(of_type(x, type_name), of_type(y, type_name)) & (1 << bits) - 1 for x, y in each(a, b)]
        assert run(f"{name}.{type_name}", a, b) == expected, name
    high = [of_type(x, type_name) * of_type(y, type_name) >> bits & (1 << bits) - 1 for x, y in each(a, b)]
    assert run(f"mul.hi.{type_name}", a, b) == high
    if bits < 64:
        whole = [of_type(x, type_name) * of_type(y, type_name) & (1 << 2 * bits) - 1 for x, y in each(a, b)]
        assert run(f"mul.wide.{type_name}", a, b) == whole


@pytest.mark.parametrize("type_name", INTEGER_TYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_integer_arithmetic_of_three(type_name, data):
    bits = int(type_name[1:])
    a, b, c = (data.draw(words(bits)) for _ in range(3))
    x, y = [of_type(v, type_name) for v in a], [of_type(v, type_name) for v in b]
    mask = (1 << bits) - 1
    assert run(f"mad.lo.{type_name}", a, b, c) == [p * q + r & mask for p, q, r in each(x, y, c)]
    assert run(f"mad.hi.{type_name}", a, b, c) == [(p * q >> bits) + r & mask for p, q, r in each(x, y, c)]
    assert run(f"sad.{type_name}", a, b, c) == [abs(p - q) + r & mask for p, q, r in each(x, y, c)]
    if type_name[0] == "s":
        assert run(f"abs.{type_name}", a) == [abs(p) & mask for p in x]
        assert run(f"neg.{type_name}", a) == [-p & mask for p in x]


@settings(max_examples=25, deadline=None)
@given(words(32), words(32))
def test_wide_multiply_add(a, b):
    c = [x * y ^ 0x9E3779B97F4A7C15 for x, y in each(a, b)]
    for sign in "us":
        exact = [of_type(x, sign + "32") * of_type(y, sign + "32") + z & (1 << 64) - 1 for x, y, z in each(a, b, c)]
        assert run(f"mad.wide.{sign}32", a, b, c) == exact


@pytest.mark.parametrize("bits", [32, 64])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_carries(bits, data):
    a, b, carry = data.draw(words(bits)), data.draw(words(bits)), data.draw(words(1))
    mask = (1 << bits) - 1
    assert run(f"add.cc.u{bits}", a, b) == [(x + y & mask, x + y >> bits) for x, y in each(a, b)]
    assert run(f"sub.cc.u{bits}", a, b) == [(x - y & mask, int(x < y)) for x, y in each(a, b)]
    rows = list(each(a, b, carry))
    assert run(f"addc.cc.u{bits}", a, b, carry) == [(x + y + z & mask, x + y + z >> bits) for x, y, z in rows]
    assert run(f"subc.cc.u{bits}", a, b, carry) == [(x - y - z & mask, int(x < y + z)) for x, y, z in rows]
    assert run(f"addc.u{bits}", a, b, carry) == [x + y + z & mask for x, y, z in rows]
    product = [(x * y & mask) + x for x, y, _ in rows]
    assert run(f"mad.lo.cc.u{bits}", a, b, a) == [(p & mask, p >> bits) for p in product]
    product = [(x * y >> bits) + x + z for x, y, z in rows]
    assert run(f"madc.hi.cc.u{bits}", a, b, a, carry) == [(p & mask, p >> bits) for p in product]
    assert alu.carry_use("addc", ("cc", "u32")) == (True, True) and alu.carry_use("add", ("u32",)) == (False, False)


@settings(max_examples=25, deadline=None)
@given(words(32), words(32), words(32))
def test_saturation_halves_and_dot_products(a, b, c):
    def clip(value, bits):
        return max(-(1 << bits - 1), min((1 << bits - 1) - 1, value)) & (1 << bits) - 1

    assert run("add.sat.s32", a, b) == [clip(signed(x, 32) + signed(y, 32), 32) for x, y in each(a, b)]
    assert run("sub.sat.s32", a, b) == [clip(signed(x, 32) - signed(y, 32), 32) for x, y in each(a, b)]

    def halves(f):
        return [sum((f(x >> s & 0xFFFF, y >> s & 0xFFFF) & 0xFFFF) << s for s in (0, 16)) for x, y in each(a, b)]

    assert run("add.u16x2", a, b) == halves(lambda x, y: x + y)
    assert run("max.s16x2", a, b) == halves(lambda x, y: max(signed(x, 16), signed(y, 16)))
    assert run("min.relu.s16x2", a, b) == halves(lambda x, y: max(0, min(signed(x, 16), signed(y, 16))))

    def part(value, index, type_name, bits):
        value = value >> bits * index & (1 << bits) - 1
        return signed(value, bits) if type_name == "s32" else value

    for ta in ("u32", "s32"):
        for tb in ("u32", "s32"):
            four = [sum(part(x, i, ta, 8) * part(y, i, tb, 8) for i in range(4)) for x, y in each(a, b)]
            assert run(f"dp4a.{ta}.{tb}", a, b, c) == [f + z & 0xFFFFFFFF for f, z in each(four, c)]
            for half, first in (("lo", 0), ("hi", 2)):
                two = [sum(part(x, i, ta, 16) * part(y, first + i, tb, 8) for i in (0, 1)) for x, y in each(a, b)]
                assert run(f"dp2a.{half}.{ta}.{tb}", a, b, c) == [f + z & 0xFFFFFFFF for f, z in each(two, c)]


# ----------------------------------------------------------------------------------------------------------------- bits


@settings(max_examples=10, deadline=None)
@given(words(32), words(32), words(32))
def test_every_function_of_three_bits(a, b, c):
    for table in range(256):
        expected = [
            sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
            for x, y, z in each(a[:2], b[:2], c[:2])
        ]
        assert run("lop3.b32", a[:2], b[:2], c[:2], [table, table]) == expected


@pytest.mark.parametrize("bits", [16, 32, 64])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_logic_and_shifts(bits, data):
    a, b, amount = data.draw(words(bits)), data.draw(words(bits)), data.draw(words(32))
    mask = (1 << bits) - 1
    assert run(f"and.b{bits}", a, b) == [x & y for x, y in each(a, b)]
    assert run(f"or.b{bits}", a, b) == [x | y for x, y in each(a, b)]
    assert run(f"xor.b{bits}", a, b) == [x ^ y for x, y in each(a, b)]
    assert run(f"not.b{bits}", a) == [~x & mask for x in a]
    assert run(f"shl.b{bits}", a, amount) == [x << min(n, 64) & mask for x, n in each(a, amount)]
    assert run(f"shr.b{bits}", a, amount) == [x >> min(n, 64) for x, n in each(a, amount)]
    assert run(f"shr.u{bits}", a, amount) == [x >> min(n, 64) for x, n in each(a, amount)]
    assert run(f"shr.s{bits}", a, amount) == [signed(x, bits) >> min(n, 64) & mask for x, n in each(a, amount)]


def test_logic_of_predicates():
    a, b = [0, 0, 1, 1], [0, 1, 0, 1]
    assert run("and.pred", a, b) == [0, 0, 0, 1] and run("xor.pred", a, b) == [0, 1, 1, 0]
    assert run("not.pred", a) == [1, 1, 0, 0]


@settings(max_examples=50, deadline=None)
@given(words(32), words(32), words(32))
def test_funnel_shifts(a, b, amount):
    for mode, count in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        rows = [((y << 32) | x, count(n)) for x, y, n in each(a, b, amount)]
        assert run(f"shf.l.{mode}.b32", a, b, amount) == [w << n >> 32 & 0xFFFFFFFF for w, n in rows]
        assert run(f"shf.r.{mode}.b32", a, b, amount) == [w >> n & 0xFFFFFFFF for w, n in rows]


@pytest.mark.parametrize("bits", [32, 64])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_bit_fields(bits, data):
    a, b = data.draw(words(bits)), data.draw(words(bits))
    position, length = data.draw(words(8)), data.draw(words(8))

    def extract(x, p, n, sign):
        fill = x >> min(p + n - 1, bits - 1) & 1 if sign and n else 0
        inside = [x >> p + i & 1 if i < n and p + i < bits else fill for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(inside))

    for sign in "us":
        expected = [extract(x, p, n, sign == "s") for x, p, n in each(a, position, length)]
        assert run(f"bfe.{sign}{bits}", a, position, length) == expected

    def insert(x, y, p, n):
        for i in range(min(n, bits - p)):
            y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        return y

    expected = [insert(x, y, p, n) for x, y, p, n in each(a, b, position, length)]
    assert run(f"bfi.b{bits}", a, b, position, length) == expected


@pytest.mark.parametrize("bits", [32, 64])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_counting_bits(bits, data):
    a = data.draw(words(bits))
    assert run(f"popc.b{bits}", a) == [x.bit_count() for x in a]
    assert run(f"clz.b{bits}", a) == [bits - x.bit_length() for x in a]
    assert run(f"brev.b{bits}", a) == [int(f"{x:0{bits}b}"[::-1], 2) for x in a]
    magnitudes = [~v if (v := signed(x, bits)) < 0 else v for x in a]
    for type_name, found in ((f"u{bits}", a), (f"s{bits}", magnitudes)):
        assert run(f"bfind.{type_name}", a) == [x.bit_length() - 1 & 0xFFFFFFFF for x in found]
        shifts = [bits - x.bit_length() if x else 0xFFFFFFFF for x in found]
        assert run(f"bfind.shiftamt.{type_name}", a) == shifts


@settings(max_examples=25, deadline=None)
@given(words(32), words(32), words(16))
def test_byte_permutations(a, b, selector):
    def nibble(both, n):
        byte = both >> 8 * (n & 7) & 255
        return (255 if byte & 128 else 0) if n & 8 else byte

    both = [(y << 32) | x for x, y in each(a, b)]
    expected = [sum(nibble(w, s >> 4 * k & 15) << 8 * k for k in range(4)) for w, s in each(both, selector)]
    assert run("prmt.b32", a, b, selector) == expected


# The PTX ISA's table of prmt modes: per selector value, the source bytes of result bytes 3, 2, 1, 0.
PRMT_MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_modes_of_byte_permutations(mode):
    expected = [int("".join(f"a{digit}" for digit in row), 16) for row in PRMT_MODES[mode]]
    assert run(f"prmt.b32.{mode}", [0xA3A2A1A0] * 4, [0xA7A6A5A4] * 4, [4, 1, 2, 3]) == expected


def test_masks_of_fields():
    assert run("bmsk.clamp.b32", [0, 4, 31, 40], [0, 8, 5, 1]) == [0, 0xFF0, 1 << 31, 0]


# ------------------------------------------------------------------------------------------------------------- compares

COMPARES = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_comparisons(data):
    for type_name in (*INTEGER_TYPES, "f32", "f64", "bf16", "f16"):
        whole = type_name in INTEGER_TYPES
        draw = words(int(type_name[1:])) if whole else floats(type_name)
        a, b, c = data.draw(draw), data.draw(draw), data.draw(words(1))
        b[0] = a[0]
        number = (lambda v: of_type(v, type_name)) if whole else (lambda v: to_number(v, type_name))  # noqa: B023
        rows = [(number(x), number(y)) for x, y in each(a, b)]
        nan = [x != x or y != y for x, y in rows]
        for name, test in COMPARES.items():
            expected = [int(test(x, y) and not n) for (x, y), n in each(rows, nan)]
            assert run(f"setp.{name}.{type_name}", a, b) == expected
            if not whole:
                expected = [int(test(x, y) or n) for (x, y), n in each(rows, nan)]
                assert run(f"setp.{name}u.{type_name}", a, b) == expected
            both = [(e & z, (1 - e) & z) for e, z in each(expected, c)]
            suffix = "" if whole else "u"
            assert run(f"setp.{name}{suffix}.and.{type_name}", a, b, c, destinations=2) == both
            assert run(f"setp.{name}{suffix}.or.{type_name}", a, b, c) == [e | z for e, z in each(expected, c)]
            assert run(f"setp.{name}{suffix}.xor.{type_name}", a, b, c) == [e ^ z for e, z in each(expected, c)]
        if not whole:
            assert run(f"setp.nan.{type_name}", a, b) == list(map(int, nan))
            assert run(f"setp.num.{type_name}", a, b) == [int(not n) for n in nan]


def test_choices():
    assert run("selp.b32", [1, 2], [3, 4], [1, 0]) == [1, 4]
    assert run("slct.u32.s32", [1, 2], [3, 4], [0, -1]) == [1, 4]
    assert run("setp.lo.u32", [1, 2], [2, 1]) == [1, 0] and run("setp.hs.u32", [1, 2], [2, 1]) == [0, 1]
    assert run("set.lt.u32.s32", [-1], [0]) == [0xFFFFFFFF] and run("set.lt.f32.s32", [-1], [0]) == [0x3F800000]
    assert run("setp.eq.f16x2", [0x3C000000], [0x3C003C00], destinations=2) == [(0, 1)]


@pytest.mark.parametrize(
    "text",
    ["frobnicate.u32", "add.fast.u32", "add.q32", "mul.u32", "prmt.b32.zzz", "cvt.rn.e4m3x2.f32", "add.wide.f32"],
)
def test_what_is_not_known_is_named(text):
    opcode, *modifiers = text.split(".")
    with pytest.raises(alu.UnsupportedInstruction, match=text):
        alu.compile_op(opcode, tuple(modifiers))
