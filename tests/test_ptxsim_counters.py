"""What the counters count."""

import numpy as np
import pytest
from ptxsim.counters import count_wavefronts
from ptxsim_text import run


def test_instructions_by_opcode_and_by_line():
    counters = run(
        "setp.lt.u32 %p1, %t, 8;\n@%p1 bra A;\nadd.u32 %r1, %t, 1;\nA: add.u32 %r2, %t, 1;", block=64
    ).machine.counters
    assert counters.opcodes["add.u32"] == 4
    assert counters.opcodes["setp.lt.u32"] == 2 and counters.opcodes["bra"] == 2
    line = counters.lines["test.cu", 3]
    assert (line.warp_instructions, line.thread_instructions) == (2, 56)
    assert counters.lines["test.cu", 4].thread_instructions == 2 * 64  # with the ret
    assert counters.kernels["k"] == counters.warp_instructions == sum(counters.opcodes.values())


@pytest.mark.parametrize(
    ("address", "size", "wavefronts", "least"),
    [
        (lambda lane: 4 * lane, 4, 1, 1),
        (lambda lane: 0 * lane, 4, 1, 1),
        (lambda lane: 8 * lane, 4, 2, 1),
        (lambda lane: 128 * lane, 4, 32, 1),
        (lambda lane: 132 * lane, 4, 1, 1),
        (lambda lane: lane, 1, 1, 1),
        (lambda lane: 128 * (lane // 4) + lane % 4, 1, 8, 1),
        (lambda lane: 8 * lane, 8, 2, 2),
        (lambda lane: 16 * lane, 16, 4, 4),
        (lambda lane: 32 * lane, 16, 8, 4),
        (lambda lane: 144 * lane, 16, 4, 4),
        (lambda lane: 128 * lane, 16, 32, 4),
    ],
)
def test_wavefronts(address, size, wavefronts, least):
    assert count_wavefronts(address(np.arange(32, dtype=np.uint64)), size) == (wavefronts, least)


def test_shared_traffic_by_line():
    body = """
    mov.u32 %r9, dynamic;
    mad.lo.u32 %r1, %t, 4, %r9; st.shared.u32 [%r1], %t;
    mad.lo.u32 %r2, %t, 8, %r9; st.shared.u32 [%r2], %t;
    setp.lt.u32 %p1, %t, 4;
    @%p1 ld.shared.u32 %r3, [%r2];
    """
    counters = run(body, shared=256).machine.counters
    traffic = [counters.shared["test.cu", line] for line in (2, 3, 5)]
    assert [(t.accesses, t.wavefronts, t.least) for t in traffic] == [(1, 1, 1), (1, 2, 1), (1, 1, 1)]
    assert (counters.wavefronts, counters.least_wavefronts) == (4, 3)


def test_global_sectors():
    body = """
    mul.wide.u32 %d1, %t, 4; add.s64 %d1, %x, %d1; ld.global.u32 %r1, [%d1];
    mul.wide.u32 %d2, %t, 64; add.s64 %d2, %x, %d2; ld.global.u32 %r1, [%d2];
    ld.global.u32 %r1, [%x];
    add.s64 %d3, %d1, 4; setp.lt.u32 %p1, %t, 8; @%p1 ld.global.u32 %r1, [%d3];
    mul.wide.u32 %d4, %t, 2; add.s64 %d4, %out, %d4; st.global.u16 [%d4], %t;
    """
    counters = run(body, x=np.zeros(512, np.uint32), out=64, readonly=("x",)).machine.counters
    loads = [counters.loads["test.cu", line] for line in (1, 2, 3, 4)]
    assert [(t.sectors, t.used) for t in loads] == [(4, 128), (32, 128), (1, 4), (2, 32)]
    store = counters.stores["test.cu", 5]
    assert (store.sectors, store.used) == (2, 64)
    assert counters.regions_read == {"x": 32 * 39} and counters.regions_written == {"out": 64}


def test_counts_go_on_until_they_are_cleared():
    first = run("mov.u32 %r1, 0;")
    machine = first.machine
    once = machine.counters.warp_instructions
    run("mov.u32 %r1, 0;", machine=machine)
    assert machine.counters.warp_instructions == 2 * once
    machine.counters.clear()
    assert machine.counters.warp_instructions == 0 and not machine.counters.opcodes
