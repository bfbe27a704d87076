"""PTX text -> instructions: the traps that nvcc's output has for a parser."""

import numpy as np
import pytest
from ptxsim import UnsupportedInstruction, parse_ptx
from ptxsim.parse import ParseError
from ptxsim.program import Address, Immediate, Pair, Register, Sink, Symbol, Vector
from ptxsim_text import STORE, clean, module_text, run


def instructions(body: str, **arguments):
    kernel = parse_ptx(module_text(body, **arguments)).kernels["k"]
    skipped = 1 + len(arguments.get("parameters", ()))
    return kernel.instructions[skipped:-2]


def test_inline_assembly_uses_names_again():
    # Two scopes with the same label and register names, within each other and one after the other.
    result = clean(
        """
        mov.u32 %r0, 0;
        {
        .reg .pred P1; .reg .b32 n;
        mov.u32 n, 3;
        LOOP:
        add.u32 %r0, %r0, 1;
        sub.u32 n, n, 1;
        setp.eq.u32 P1, n, 0;
        @P1 bra DONE;
        { .reg .b32 n; mov.u32 n, 100; add.u32 %r0, %r0, n; }
        bra LOOP;
        DONE:
        }
        {
        .reg .pred P1;
        LOOP:
        add.u32 %r0, %r0, 10;
        setp.ge.u32 P1, %r0, 250;
        @!P1 bra LOOP;
        }
        """
        + STORE,
        out=128,
    )
    assert (result.values("out") == 253).all()


def test_registers_of_two_kernels_and_both_ways_to_declare_them():
    text = module_text(".reg.b16 a,b; mov.u16 a, 7; mov.u16 b, a;")
    text += text.split(".address_size 64")[1].replace("entry k(", "entry other(").replace(".extern .shared", "//")
    module = parse_ptx(text)
    assert set(module.kernels) == {"k", "other"}
    assert all(kernel.instructions[-1].opcode == "ret" for kernel in module.kernels.values())


def test_operands():
    shuffle, move, unpack, load, vote = instructions(
        """
        shfl.sync.idx.b32 %r1|%p1, %t, %r2, 31, -1;
        mov.b64 %d1, {%r1, %r2};
        mov.b64 {%r3, _}, %d1;
        ld.global.v2.u32 {%r3, %r4}, [%d1+-8];
        vote.sync.any.pred %p2, !%p1, 0xffffffff;
        """
    )
    assert isinstance(shuffle.operands[0], Pair)
    assert [type(operand) for operand in move.operands] == [Register, Vector]
    assert isinstance(unpack.operands[0].items[1], Sink)
    assert load.modifiers == ("global", "v2", "u32")
    address = load.operands[1]
    assert isinstance(address, Address) and address.offset == -8 and address.base.name == "%d1"
    assert vote.operands[1].negated and vote.operands[2].value == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("text", "value", "row"),
    [
        ("mov.f32 %f1, 0f3F800000", 0x3F800000, 0x3F800000),
        ("mov.f64 %d1, 0d3FF0000000000000", 0x3FF0 << 48, 0x3FF0 << 48),
        ("add.s32 %r1, %r2, -5", -5, 0xFFFFFFFB),
        ("add.s64 %d1, %d2, -5", -5, (1 << 64) - 5),
        ("and.b32 %r1, %r2, 0xFFU", 255, 255),
        ("mad.wide.s32 %d1, %r1, %r2, -1", -1, (1 << 64) - 1),
        ("mul.wide.s32 %d1, %r1, -4", -4, (1 << 32) - 4),
    ],
)
def test_immediates_are_as_wide_as_the_operand(text, value, row):
    kernel = parse_ptx(module_text(text + ";")).kernels["k"]
    immediate = kernel.instructions[1].operands[-1]
    assert isinstance(immediate, Immediate) and immediate.value == value
    assert kernel.slots[immediate.slot].value == row


def test_a_decimal_float():
    kernel = parse_ptx(module_text("createpolicy.fractional.L2::evict_first.b64 %d1, 1.0;")).kernels["k"]
    instruction = kernel.instructions[1]
    assert instruction.modifiers == ("fractional", "L2::evict_first", "b64")
    assert instruction.operands[1].value == 0x3FF << 52


def test_two_colons_are_one_modifier_and_coordinates_follow_an_address():
    (copy,) = instructions(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3];"
    )
    assert copy.modifiers == ("async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes")
    (tensor,) = instructions("cp.async.bulk.tensor.2d.global.shared::cta [%d1, {%r1, %r2}], [%r3];")
    assert isinstance(tensor.operands[0].rest[0], Vector)


def test_locations_follow_every_level_of_inlining():
    text = module_text(
        """
        .loc 2 14 3, function_name $L__info_string0, inlined_at 1 7 5
        .loc 3 25 3, function_name $L__info_string1, inlined_at 2 14 3
        add.u32 %r1, %t, 1;
        .loc 1 0 5
        add.u32 %r1, %r1, 1;
        """
    )
    text += '.file 2 "/x/nibble.cuh"\n.file 3 "/x/bits.cuh"\n'
    text += ".section .debug_str\n{\n$L__info_string0:\n.b8 95,90,0\n$L__info_string1:\n.b8 1;\n}\n"
    first, second = parse_ptx(text).kernels["k"].instructions[1:3]
    assert first.location.frames == (("bits.cuh", 25), ("nibble.cuh", 14), ("test.cu", 7))
    assert str(first.location) == "bits.cuh:25 < nibble.cuh:14 < test.cu:7"
    # Line 0 is the compiler's own: the last real line stands.
    assert second.location == first.location


def test_local_isn_t_a_location():
    result = clean(
        """
        .local .align 8 .b8 depot[16];
        mov.u64 %d1, depot;
        st.local.u32 [%d1+4], %t;
        ld.local.u32 %r0, [depot+4];
        """
        + STORE,
        out=128,
    )
    assert (result.values("out") == np.arange(32)).all()


def test_struct_parameters_are_read_through_their_address():
    text = module_text("", ("out",)).replace(".param .u64 k_out", ".param .align 8 .b8 k_out[24]")
    body = """
    mov.b64 %d1, k_out;
    ld.param.u64 %d2, [%d1];
    ld.param.v2.u32 {%r1, %r2}, [%d1+8];
    ld.param.u8 %r3, [k_out+16];
    add.u32 %r0, %r1, %r2; add.u32 %r0, %r0, %r3;
    st.global.u32 [%d2], %r0;
    """
    kernel = parse_ptx(text.replace("\tret;", body + "\n\tret;")).kernels["k"]
    assert kernel.parameter_bytes == 24
    from ptxsim import Machine

    machine = Machine()
    out = machine.allocate(4, "out")
    arguments = np.array([out.base, 20 | 300 << 32, 5], np.uint64).tobytes()
    assert machine.launch(kernel, 1, 1, 0, arguments) == []
    assert out.data[:4].view(np.uint32)[0] == 325


def test_variables_of_the_module():
    result = clean(
        """
        mov.u64 %d1, table;
        mul.wide.u32 %d2, %t, 4;
        add.u64 %d2, %d1, %d2;
        ld.const.u32 %r0, [%d2];
        ld.global.u32 %r1, [zeros+4];
        add.u32 %r0, %r0, %r1;
        """
        + STORE,
        block=3,
        out=12,
        declarations=".const .align 4 .b8 table[12] = {1, 0, 0, 0, 2, 1, 0, 0, 3};\n.global .align 4 .u32 zeros[4];",
    )
    assert result.values("out").tolist() == [1, 258, 3]


def test_switches_are_tables_of_branches():
    result = clean(
        """
        and.b32 %r1, %t, 3;
        ts: .branchtargets A, B, C, A;
        brx.idx %r1, ts;
        A: mov.u32 %r0, 10; bra END;
        B: mov.u32 %r0, 20; bra END;
        C: mov.u32 %r0, 30;
        END:
        """
        + STORE,
        out=128,
    )
    assert result.values("out").tolist() == [10, 20, 30, 10] * 8


@pytest.mark.parametrize(
    ("body", "names"),
    [("bra NOWHERE;", "NOWHERE"), ("add.u32 %r1, %unknown, 1;", "%unknown"), ("@%q bra X; X:", "%q")],
)
def test_names_that_don_t_exist(body, names):
    with pytest.raises(ParseError, match=names):
        parse_ptx(module_text(body))


@pytest.mark.parametrize(
    "text",
    [
        "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%d1, {%r1}]",
        "add.rm.sat.f99 %f1, %f2, %f3",
        "red.global.add.f16x2 [%d1], %r1",
    ],
)
def test_unknown_instructions_are_named_with_their_place(text):
    with pytest.raises(UnsupportedInstruction) as error:
        run(f"mov.u32 %r1, 1;\n{text};")
    assert text.split()[0] in str(error.value) and "test.cu:2" in str(error.value)


def test_symbols_of_shared_memory():
    first, second = instructions(".shared .align 4 .b8 a[32];\nmov.u32 %r1, a;\nmov.u32 %r2, dynamic;")
    assert isinstance(first.operands[1], Symbol) and first.operands[1].space == "shared"
    assert second.operands[1].space == "dynamic"
