"""Which accesses are ordered: between lanes, warps and CTAs, in shared and in global memory."""

import numpy as np
import pytest
from ptxsim import Kind
from ptxsim_text import clean, run

# s[t] = t, then x = s[t ^ DISTANCE]; %r1 is the own place, %r2 the other.
EXCHANGE = """
.shared .align 4 .b8 s[512];
mov.u32 %r9, s; mad.lo.u32 %r1, %t, 4, %r9; xor.b32 %r3, %t, {distance}; mad.lo.u32 %r2, %r3, 4, %r9;
st.shared.u32 [%r1], %t;
{between}
ld.shared.u32 %r4, [%r2];
"""


def exchange(distance: int, between: str) -> str:
    return EXCHANGE.format(distance=distance, between=between)


@pytest.mark.parametrize("seed", range(3))
def test_lanes_of_a_warp_need_a_barrier(seed):
    report = run(exchange(1, ""), seed=seed).only(Kind.RACE, 5)
    assert report.other.location.line == 3
    assert not run(exchange(1, "bar.warp.sync -1;"), seed=seed).reports
    assert not run(exchange(0, ""), seed=seed).reports


def test_votes_and_shuffles_order_no_memory():
    """They bring lanes together, but the ISA gives only bar.warp.sync memory order."""
    run(exchange(1, "vote.sync.ballot.b32 %r5, 1, -1;")).only(Kind.RACE, 5)
    run(exchange(1, "shfl.sync.idx.b32 %r5, %t, 0, 31, -1;")).only(Kind.RACE, 5)


def test_a_barrier_of_some_lanes_orders_only_these():
    half = "setp.lt.u32 %p1, %t, 16; selp.b32 %r5, 0xffff, 0xffff0000, %p1; bar.warp.sync %r5;"
    assert not run(exchange(8, half)).reports
    run(exchange(16, half)).only(Kind.RACE, 5)


def test_warps_need_a_barrier_of_the_cta():
    assert not run(exchange(32, "bar.sync 0;"), block=128).reports
    assert Kind.RACE in run(exchange(32, "bar.warp.sync -1;"), block=128).kinds()


def test_a_named_barrier_orders_those_who_take_part():
    pairs = "shr.u32 %r5, %t, 6; add.u32 %r5, %r5, 1; bar.sync %r5, 64;"
    assert not run(exchange(32, pairs), block=128).reports
    assert Kind.RACE in run(exchange(64, pairs), block=128).kinds()


def test_arrive_releases_and_sync_acquires():
    body = """
    .shared .align 4 .b8 s[128];
    setp.lt.u32 %p1, %t, 32; mov.u32 %r9, s; and.b32 %r2, %t, 31; mad.lo.u32 %r1, %r2, 4, %r9;
    @!%p1 bra CONSUMER;
    st.shared.u32 [%r1], %t;
    bar.arrive 1, 64;
    {late}
    bra END;
    CONSUMER: bar.sync 1, 64;
    ld.shared.u32 %r4, [%r1];
    END: mov.u32 %r5, 0;
    """
    for seed in range(4):
        assert not run(body.format(late=""), block=64, seed=seed).reports
    # What the producer does after its arrival isn't ordered.
    found = [run(body.format(late="st.shared.u32 [%r1], 7;"), block=64, seed=seed).kinds() for seed in range(4)]
    assert all(kinds == {Kind.RACE} for kinds in found)


@pytest.mark.parametrize("seed", range(3))
def test_reading_and_then_writing_by_another(seed):
    body = """
    .shared .align 4 .b8 s[128];
    mov.u32 %r9, s; mad.lo.u32 %r1, %t, 4, %r9; xor.b32 %r3, %t, 1; mad.lo.u32 %r2, %r3, 4, %r9;
    st.shared.u32 [%r1], %t;
    bar.warp.sync -1;
    ld.shared.u32 %r4, [%r2];
    {between}
    st.shared.u32 [%r1], %r4;
    """
    assert not run(body.format(between="bar.warp.sync -1;"), seed=seed).reports
    report = run(body.format(between=""), seed=seed).only(Kind.RACE, 7)
    assert "reads" in report.detail and report.other.location.line == 5


def test_many_readers_of_one_word():
    """All of them must be ordered before the write, not only the last."""
    body = """
    .shared .align 4 .b8 s[4];
    setp.eq.u32 %p1, %t, 0;
    @%p1 st.shared.u32 [s], 1;
    bar.sync 0;
    ld.shared.u32 %r1, [s];
    {0}
    @%p1 st.shared.u32 [s], 2;
    """
    assert not run(body.format("bar.sync 0;"), block=128).reports
    # Only the first two warps meet.
    some = "setp.lt.u32 %p2, %t, 64; @%p2 bar.sync 1, 64;"
    result = run(body.format(some), block=128)
    assert (result.kinds() == {Kind.RACE} and {report.line for report in result.reports} == {7, 5}) or {
        report.line for report in result.reports
    } in ({7}, {5})


def test_bytes_of_a_word_are_told_apart():
    """Each lane has a byte of its own: reading and writing it again is no race."""
    body = """
    .shared .align 4 .b8 s[32];
    mov.u32 %r9, s; add.u32 %r1, %r9, %t;
    st.shared.u8 [%r1], %t;
    ld.shared.u8 %r2, [%r1];
    st.shared.u8 [%r1], %r2;
    bar.warp.sync -1;
    and.b32 %r3, %r1, -4;
    ld.shared.u32 %r4, [%r3];
    bar.warp.sync -1;
    st.shared.u8 [%r1], %r2;
    """
    clean(body)


def test_words_read_before_bytes_are_written():
    """The record of readers, kept by word until then, becomes one by byte."""
    body = """
    .shared .align 4 .b8 s[128];
    mov.u32 %r9, s; mad.lo.u32 %r1, %t, 4, %r9; st.shared.u32 [%r1], %t;
    bar.warp.sync -1;
    ld.shared.u32 %r2, [s];
    xor.b32 %r3, %t, 1; mad.lo.u32 %r3, %r3, 4, %r9; ld.shared.u32 %r2, [%r3];
    st.shared.u8 [%r1+1], %t;
    """
    result = run(body)
    assert {(report.kind, report.line) for report in result.reports} == {(Kind.RACE, 6)}


def test_ctas_that_write_one_word():
    body = "setp.eq.u32 %p1, %t, 0;\nmov.u32 %r1, %ctaid.x;\n@%p1 st.global.u32 [%x], {0};"
    run(body.format("%r1"), grid=2, x=4).only(Kind.RACE, 3)
    # Also when they never run at the same time: nothing orders them.
    run(body.format("%r1"), grid=40, block=1024, x=4).only(Kind.RACE, 3)
    assert not run(body.format("%r1"), grid=1, x=4).reports


def test_atomics_of_ctas_don_t_race_among_themselves_but_with_plain_accesses():
    clean("red.global.add.u32 [%x], 1;", grid=4, x=np.zeros(1, np.uint32))
    body = "red.global.add.u32 [%x], 1;\nmov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1;\n@%p1 ld.global.u32 %r2, [%x];"
    for seed in range(3):
        assert run(body, grid=2, seed=seed, x=np.zeros(1, np.uint32)).kinds() == {Kind.RACE}


# The last CTA adds up what all have written.
LAST = """
mov.u32 %r1, %ctaid.x; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %x, %d1;
setp.ne.u32 %p1, %t, 0; @%p1 bra END;
st.global.u32 [%d1], 5;
{release}
atom.{order}global.add.u32 %r2, [%count], 1;
{acquire}
setp.ne.u32 %p2, %r2, 3; @%p2 bra END;
ld.global.v4.u32 {{%r3, %r4, %r5, %r6}}, [%x];
add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5; add.u32 %r3, %r3, %r6;
st.global.u32 [%x], %r3;
END: mov.u32 %r0, 0;
"""


@pytest.mark.parametrize(
    ("release", "order", "acquire", "fine"),
    [
        ("membar.gl;", "", "membar.gl;", True),
        ("fence.acq_rel.gpu;", "relaxed.gpu.", "fence.acq_rel.gpu;", True),
        ("fence.sc.gpu;", "", "fence.acq_rel.gpu;", True),
        ("", "acq_rel.gpu.", "", True),
        ("membar.gl;", "acquire.gpu.", "", True),
        ("", "release.gpu.", "membar.gl;", True),
        ("", "", "membar.gl;", False),
        ("membar.gl;", "", "", False),
        ("membar.cta;", "", "membar.gl;", False),
        ("", "acq_rel.cta.", "", False),
        ("", "relaxed.gpu.", "", False),
    ],
)
def test_the_last_cta_pattern(release, order, acquire, fine):
    body = LAST.format(release=release, order=order, acquire=acquire)
    for seed in range(3):
        result = run(body, grid=4, seed=seed, x=16, count=np.zeros(1, np.uint32))
        assert result.values("x")[0] == 20
        assert result.kinds() == (set() if fine else {Kind.RACE})


def test_a_fence_hands_on_what_a_barrier_brought():
    """All threads write, the CTA meets, one thread fences and tells the others."""
    body = """
    mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t; mul.wide.u32 %d1, %r2, 4; add.s64 %d1, %x, %d1;
    st.global.u32 [%d1], %t;
    bar.sync 0;
    setp.ne.u32 %p1, %t, 0; @%p1 bra MEET;
    {fence}
    atom.global.add.u32 %r3, [%count], 1;
    membar.gl;
    st.shared.u32 [dynamic], %r3;
    MEET: bar.sync 0;
    ld.shared.u32 %r3, [dynamic];
    setp.ne.u32 %p2, %r3, 1; @%p2 bra END;
    mul.wide.u32 %d2, %t, 4; add.s64 %d2, %x, %d2;
    ld.global.u32 %r4, [%d2]; ld.global.u32 %r4, [%d2+128];
    END: mov.u32 %r0, 0;
    """
    arguments = {"grid": 2, "shared": 4, "x": 256, "count": np.zeros(1, np.uint32)}
    clean(body.format(fence="membar.gl;"), **arguments)
    for seed in range(3):
        assert run(body.format(fence=""), seed=seed, **arguments).kinds() == {Kind.RACE}


def test_a_launch_sees_all_of_the_one_before():
    first = run("mul.wide.u32 %d1, %t, 4; add.s64 %d1, %x, %d1; st.global.u32 [%d1], %t;", x=128)
    x, machine = first.tensors["x"], first.machine
    body = "xor.b32 %r1, %t, 1; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %x, %d1;\nld.global.u32 %r2, [%d1];"
    assert not run(body, machine=machine, x=x).reports
    body += "\nbar.sync 0;\nst.global.u32 [%d1], %r2;"
    assert not run(body, machine=machine, x=x).reports


def test_relaxed_polling_without_a_fence_orders_nothing():
    body = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bra WRITER;
    SPIN: ld.{0}.gpu.global.u32 %r2, [%flag]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN;
    ld.global.u32 %r3, [%x];
    bra END;
    WRITER: st.global.u32 [%x], 1;
    st.{1}.gpu.global.u32 [%flag], 1;
    END: mov.u32 %r0, 0;
    """
    arguments = {"grid": 2, "block": 1, "x": 4, "flag": np.zeros(1, np.uint32)}
    clean(body.format("acquire", "release"), **arguments)
    for reader, writer in (("relaxed", "release"), ("acquire", "relaxed")):
        result = run(body.format(reader, writer), **arguments)
        result.only(Kind.RACE, 3)
