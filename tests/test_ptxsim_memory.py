"""Loads, stores and atomics: values, bounds, alignment, what was never written, address spaces."""

import numpy as np
import pytest
from ptxsim import Kind
from ptxsim_text import STORE, clean, run

WORDS = np.arange(32, dtype=np.uint32)
LOAD = "mul.wide.u32 %d1, %t, 4; add.s64 %d1, %x, %d1;"


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("u8", lambda x: x.view(np.uint8)[::4]),
        ("s8", lambda x: x.view(np.int8)[::4].astype(np.int32).view(np.uint32)),
        ("u16", lambda x: x.view(np.uint16)[::2]),
        ("s16", lambda x: x.view(np.int16)[::2].astype(np.int32).view(np.uint32)),
        ("u32", lambda x: x),
    ],
)
def test_widths_and_signs(type_name, expected):
    x = (np.arange(32, dtype=np.uint32) * 0x9E3779B9) ^ 0x80C3
    result = clean(f"{LOAD}\nld.global.{type_name} %r0, [%d1];\n{STORE}", x=x, out=128, readonly=("x",))
    assert (result.values("out") == expected(x)).all()


def test_vectors_and_64_bits():
    x = np.arange(128, dtype=np.uint32)
    result = clean(
        """
        shl.b32 %r1, %t, 4;
        cvt.u64.u32 %d1, %r1;
        add.s64 %d2, %x, %d1;
        ld.global.nc.L1::no_allocate.v4.u32 {%r4, %r5, %r6, %r7}, [%d2];
        add.s64 %d2, %out, %d1;
        st.global.v4.u32 [%d2], {%r7, %r6, %r5, %r4};
        ld.global.v2.u64 {%d4, %d5}, [%d2];
        st.global.v2.u64 [%d2], {%d5, %d4};
        """,
        x=x,
        out=512,
        readonly=("x",),
    )
    assert (result.values("out").reshape(-1, 4) == x.reshape(-1, 4)[:, [1, 0, 3, 2]]).all()


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("what", ["ld", "st"])
def test_out_of_bounds_by_one(space, width, what):
    """A lane past the end is reported, with the tensor it ran over; the other lanes do their work."""
    registers = {2: "%r1", 4: "%r1", 16: "{%r1, %r2, %r3, %r4}"}[width]
    type_name = {2: "u16", 4: "u32", 16: "v4.u32"}[width]
    operands = f"{registers}, [%d1]" if what == "ld" else f"[%d1], {registers}"
    address = "mul.wide.u32 %d0, %t, {0};\nadd.s64 %d1, %x, %d0;" if space == "global" else (
        "mov.u64 %d1, s; mul.wide.u32 %d0, %t, {0};\nadd.s64 %d1, %d1, %d0;"
    )  # fmt: skip
    fill = "" if space == "global" else _fill_shared(32 * width - width)
    body = f"""
    .shared .align 16 .b8 s[{32 * width - width}];
    mov.u32 %r1, 1; mov.u32 %r2, 1; mov.u32 %r3, 1; mov.u32 %r4, 1; {fill}
    {address.format(width)}
    {what}.{space}.{type_name} {operands};
    """
    tensors = {"x": np.zeros(32 * width - width, np.uint8)} if space == "global" else {}
    result = run(body, block=32, **tensors)
    report = result.only(Kind.OUT_OF_BOUNDS, 5)
    assert "lane 31" in report.where
    assert f"byte {31 * width} of {'x' if space == 'global' else 's'} ({31 * width} bytes)" in report.detail
    smaller = run(body, block=31, **tensors)
    assert not smaller.reports


def _fill_shared(size: int) -> str:
    """Writes the static array `s`, without a line of its own."""
    return (
        f"mov.u32 %r9, s; add.u32 %r9, %r9, %t; mov.u32 %r8, %t; mov.u32 %r7, %ntid.x; "
        f"FILL: setp.lt.u32 %p9, %r8, {size}; "
        "@%p9 st.shared.u8 [%r9], 0; add.u32 %r9, %r9, %r7; add.u32 %r8, %r8, %r7; @%p9 bra FILL; bar.sync 0;"
    )


def test_static_arrays_are_bounded_each_for_itself():
    body = """
    .shared .align 4 .b8 a[128];
    .shared .align 4 .b8 b[128];
    mov.u32 %r1, a; mov.u32 %r2, b;
    mad.lo.u32 %r3, %t, 4, %r1; mad.lo.u32 %r4, %t, 4, %r2;
    st.shared.u32 [%r3], %t;
    st.shared.u32 [%r4], %t; bar.sync 0;
    ld.shared.u32 %r5, [%r3+{0}];
    """
    assert not run(body.format(0)).reports
    report = run(body.format(4)).only(Kind.OUT_OF_BOUNDS, 7)
    assert "lane 31" in report.where and "byte 128 of a (128 bytes)" in report.detail


def test_the_dynamic_part_is_as_long_as_the_launch_says():
    body = "mov.u32 %r1, dynamic;\nmad.lo.u32 %r1, %t, 4, %r1;\nst.shared.u32 [%r1], %t;"
    assert not run(body, shared=128).reports
    report = run(body, shared=124).only(Kind.OUT_OF_BOUNDS, 3)
    assert "dynamic shared memory (124 bytes)" in report.detail
    assert run(body).only(Kind.OUT_OF_BOUNDS, 3).where.endswith("lanes 0-31")


@pytest.mark.parametrize("address", ["mov.u64 %d1, 0;", "mov.u64 %d1, 0xffffffffffffff00;", "cvt.u64.u32 %d1, %t;"])
def test_pointers_to_nothing(address):
    result = run(f"{address}\nld.global.u8 %r1, [%d1];", x=WORDS)
    result.only(Kind.OUT_OF_BOUNDS, 2)


def test_a_pointer_cut_to_32_bits_is_out_of_bounds():
    result = run("cvt.u32.u64 %r1, %x; cvt.u64.u32 %d1, %r1;\nld.global.u32 %r2, [%d1];", x=WORDS)
    result.only(Kind.OUT_OF_BOUNDS, 2)


def test_one_tensor_s_end_isn_t_another_s_start():
    body = "add.s64 %d1, %x, 128;\nld.global.u32 %r1, [%d1];"
    report = run(body, x=WORDS, y=WORDS).only(Kind.OUT_OF_BOUNDS, 2)
    assert "byte 128 of x" in report.detail


@pytest.mark.parametrize(("offset", "fires"), [(0, False), (2, True), (4, True), (8, False)])
def test_misaligned(offset, fires):
    body = f"add.s64 %d1, %x, {offset};\nld.global.u64 %d2, [%d1];"
    result = run(body, x=WORDS)
    if fires:
        result.only(Kind.MISALIGNED, 2)
    else:
        assert not result.reports


def test_misaligned_in_shared_memory_by_a_generic_address():
    body = """
    .shared .align 16 .b8 s[64];
    mov.u64 %d1, s; cvta.shared.u64 %d1, %d1;
    st.v2.u32 [%d1+{0}], {{%t, %t}};
    """
    assert run(body.format(4), block=1).only(Kind.MISALIGNED, 3)
    assert not run(body.format(8), block=1).reports


def test_read_only_tensors():
    result = run("st.global.u32 [%x], %t;", block=1, x=WORDS, readonly=("x",))
    result.only(Kind.READ_ONLY, 1)
    assert (result.values("x") == WORDS).all()


def test_uninitialised_global_memory():
    body = "st.global.u32 [%x+4], %t;\nld.global.u32 %r1, [%x+4];\nld.global.u64 %d1, [%x];"
    report = run(body, block=1, x=64).only(Kind.UNINITIALISED_MEMORY, 3)
    assert "lane 0" in report.where


def test_uninitialised_shared_bytes():
    """One byte of a word is enough."""
    body = """
    .shared .align 4 .b8 s[4];
    st.shared.u16 [s], %r1; st.shared.u8 [s+2], %r1;
    st.shared.u8 [s+3], %r1;
    ld.shared.u32 %r2, [s];
    """
    assert not run("mov.u32 %r1, 1;" + body, block=1).reports
    cut = body.replace("st.shared.u8 [s+3], %r1;", "")
    run("mov.u32 %r1, 1;" + cut, block=1).only(Kind.UNINITIALISED_MEMORY, 5)


def test_uninitialised_local_memory():
    body = ".local .align 4 .b8 depot[8];\nst.local.u32 [depot], %t;\nld.local.u32 %r1, [depot];\n"
    assert not run(body).reports
    run(body + "ld.local.u32 %r1, [depot+4];").only(Kind.UNINITIALISED_MEMORY, 4)


def test_local_memory_has_bounds():
    body = ".local .align 4 .b8 depot[8];\nst.local.u32 [depot], %t;\nst.local.u32 [depot+8], %t;"
    run(body).only(Kind.OUT_OF_BOUNDS, 3)


def test_uninitialised_registers_by_lane():
    body = "setp.lt.u32 %p1, %t, 7;\n@%p1 mov.u32 %r1, 5;\n@%p1 add.u32 %r2, %r1, 1;\nadd.u32 %r2, %r1, 1;"
    report = run(body).only(Kind.UNINITIALISED_REGISTER, 4)
    assert "lanes 7-31" in report.where and "%r1" in report.detail


def test_generic_addresses_of_every_space():
    result = clean(
        """
        .shared .align 4 .b8 s[128]; .local .align 4 .b8 depot[8];
        mov.u64 %d1, s; cvta.shared.u64 %d1, %d1; mad.wide.u32 %d1, %t, 4, %d1;
        st.u32 [%d1], %t;
        mov.u64 %d2, depot; cvta.local.u64 %d2, %d2;
        st.u32 [%d2+4], %t;
        ld.u32 %r1, [%d1];
        ld.u32 %r2, [%d2+4];
        mov.u64 %d3, k_x; cvta.param.u64 %d3, %d3;
        ld.u64 %d4, [%d3];
        mad.wide.u32 %d4, %t, 4, %d4;
        ld.u32 %r3, [%d4];
        cvta.to.shared.u64 %d5, %d1;
        ld.shared.u32 %r4, [%d5];
        add.u32 %r0, %r1, %r2; add.u32 %r0, %r0, %r3; add.u32 %r0, %r0, %r4;
        """
        + STORE,
        x=WORDS,
        out=128,
    )
    assert (result.values("out") == 4 * WORDS).all()


def test_lanes_may_mix_spaces_behind_a_generic_address():
    result = clean(
        """
        .shared .align 4 .b8 s[128];
        mov.u64 %d1, s; cvta.shared.u64 %d1, %d1; mad.wide.u32 %d1, %t, 4, %d1;
        st.u32 [%d1], 100;
        mad.wide.u32 %d2, %t, 4, %x;
        and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 1;
        selp.b64 %d3, %d1, %d2, %p1;
        ld.u32 %r0, [%d3];
        """
        + STORE,
        x=WORDS,
        out=128,
    )
    assert (result.values("out") == np.where(WORDS % 2, 100, WORDS)).all()


@pytest.mark.parametrize(
    ("name", "type_name", "expected"),
    [
        ("add", "u32", 1000 + 496),
        ("min", "s32", 0),
        ("max", "u32", 1000),
        ("or", "b32", 1000 | 31),
        ("and", "b32", 0),
        ("xor", "b32", 1000),
        ("add", "f32", None),
    ],
)
@pytest.mark.parametrize("opcode", ["atom", "red"])
def test_atomics_of_all_lanes_on_one_word(name, type_name, expected, opcode):
    start, value = np.array([1000], np.uint32), "mov.b32 %r1, %t;"
    if type_name == "f32":
        start, value, expected = np.array([1.5], np.float32), "cvt.rn.f32.u32 %r1, %t;", 497.5
    destination = "%r2, " if opcode == "atom" else ""
    result = clean(f"{value}\n{opcode}.global.{name}.{type_name} {destination}[%x], %r1;", x=start)
    assert result.values("x", start.dtype)[0] == expected


def test_atomics_return_what_they_found_in_some_order():
    orders = set()
    for seed in range(3):
        result = run("atom.global.add.u32 %r0, [%x], 1;\n" + STORE, seed=seed, x=np.zeros(1, np.uint32), out=128)
        found = result.values("out").tolist()
        assert sorted(found) == list(range(32)) and not result.reports
        orders.add(tuple(found))
    assert len(orders) > 1


def test_compare_and_swap_and_wrapping_counters():
    result = clean(
        """
        atom.global.cas.b64 %d1, [%x], 7, 100;
        atom.global.cas.b64 %d2, [%x], 7, 200;
        atom.global.exch.b32 %r1, [%x+8], 5;
        atom.global.inc.u32 %r2, [%x+12], 2;
        atom.global.inc.u32 %r3, [%x+12], 2;
        atom.global.dec.u32 %r4, [%x+16], 9;
        """,
        block=1,
        x=np.array([7, 3 | 2 << 32, 0], np.uint64),
    )
    assert result.values("x").tolist() == [100, 0, 5, 1, 9, 0]


def test_atomics_in_shared_memory_and_bounds_of_atomics():
    body = """
    .shared .align 4 .b8 s[4];
    setp.eq.u32 %p1, %t, 0;
    @%p1 st.shared.u32 [s], 0;
    bar.sync 0;
    atom.shared.add.u32 %r1, [s], 1;
    atom.shared.add.u32 %r1, [s+{0}], 1;
    """
    assert not run(body.format(0), block=64).reports
    run(body.format(4), block=64).only(Kind.OUT_OF_BOUNDS, 6)


def test_lanes_that_write_one_word_differently():
    assert not run("st.global.u32 [%x], 5;", x=WORDS).reports
    report = run("st.global.u32 [%x], %t;", x=WORDS).only(Kind.RACE, 1)
    assert "different values" in report.detail


def test_the_non_coherent_cache_isn_t_for_what_a_kernel_writes():
    body = "mul.wide.u32 %d1, %t, 4; add.s64 %d1, %x, %d1; st.global.u32 [%d1], %t;\nld.global{0}.u32 %r1, [%d1];"
    assert not run(body.format(""), x=128).reports
    report = run(body.format(".nc"), x=128).only(Kind.RACE, 2)
    assert "non-coherent" in report.detail
