"""Lanes that part and meet: branches, exits, shuffles and votes with member masks, aligned instructions."""

import numpy as np
import pytest
from ptxsim import Kind
from ptxsim_text import STORE, clean, run

LANE = np.arange(32)


def test_branches_part_and_meet():
    result = clean(
        """
        and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 1;
        mov.u32 %r0, %t;
        @%p1 bra ODD;
        mul.lo.u32 %r0, %r0, 10;
        bra MEET;
        ODD: add.u32 %r0, %r0, 1000;
        MEET: activemask.b32 %r2;
        setp.ne.u32 %p2, %r2, -1;
        @%p2 add.u32 %r0, %r0, 100000;
        """
        + STORE,
        out=128,
    )
    assert (result.values("out") % 100000 == np.where(LANE % 2, LANE + 1000, LANE * 10)).all()


def test_loops_of_different_lengths():
    result = clean(
        """
        mov.u32 %r0, 0; mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1; add.u32 %r0, %r0, %r1;
        setp.lt.u32 %p1, %r1, %t;
        @%p1 bra LOOP;
        """
        + STORE,
        out=128,
    )
    steps = np.maximum(LANE, 1)
    assert (result.values("out") == steps * (steps + 1) // 2).all()


def test_a_lane_that_waits_for_another_of_its_warp_doesn_t_keep_it_from_running():
    body = """
    setp.eq.u32 %p1, %t, 31; @%p1 bra SET;
    SPIN: ld.acquire.gpu.global.u32 %r1, [%x];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SPIN;
    bra END;
    SET: st.release.gpu.global.u32 [%x], 1;
    END:
    """
    clean(body, x=np.zeros(1, np.uint32))


def test_exits_of_some_lanes():
    result = clean(
        "mov.u32 %r0, 1;" + STORE + "setp.lt.u32 %p1, %t, 20; @%p1 exit; mov.u32 %r0, 2;" + STORE,
        out=128,
    )
    assert (result.values("out") == np.where(LANE < 20, 1, 2)).all()


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("idx", 5, 31, np.full(32, 5)),
        ("idx", 5, 0x181F, (LANE & 24) | 5),
        ("bfly", 3, 31, LANE ^ 3),
        ("down", 4, 31, np.where(LANE + 4 <= 31, LANE + 4, LANE)),
        ("down", 4, 0x181F, np.where((LANE & 7) + 4 <= 7, LANE + 4, LANE)),
        ("up", 4, 0, np.where(LANE >= 4, LANE - 4, LANE)),
        ("up", 4, 0x1800, np.where((LANE & 7) >= 4, LANE - 4, LANE)),
        ("bfly", 8, 0x181F, np.where((LANE ^ 8) <= (LANE & 24 | 7), LANE ^ 8, LANE)),
    ],
)
def test_shuffles(mode, b, c, source):
    result = clean(
        f"mul.lo.u32 %r1, %t, 3;\nshfl.sync.{mode}.b32 %r0|%p1, %r1, {b}, {c}, -1;\n"
        + STORE
        + "selp.u32 %r0, 1, 0, %p1; add.s64 %d0, %d0, 128; st.global.u32 [%d0], %r0;",
        out=256,
    )
    values = result.values("out")
    assert (values[:32] == 3 * source).all()
    in_range = (source != LANE) | (mode == "idx")
    assert (values[32:][in_range] == 1).all() and (mode == "idx" or (values[32:][~in_range] == 0).all())


def test_votes_matches_and_reductions():
    result = clean(
        """
        and.b32 %r1, %t, 3; setp.eq.u32 %p1, %r1, 2;
        vote.sync.ballot.b32 %r2, %p1, -1; st.global.u32 [%out], %r2;
        vote.sync.any.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%out+4], %r2;
        vote.sync.all.pred %p2, !%p1, -1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%out+8], %r2;
        vote.sync.uni.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%out+12], %r2;
        redux.sync.add.s32 %r2, %t, -1; st.global.u32 [%out+16], %r2;
        redux.sync.max.u32 %r2, %r1, -1; st.global.u32 [%out+20], %r2;
        match.any.sync.b32 %r3, %r1, -1;
        setp.eq.u32 %p3, %t, 6;
        @%p3 st.global.u32 [%out+24], %r3;
        match.all.sync.b32 %r3|%p4, %r1, -1; st.global.u32 [%out+28], %r3;
        elect.sync %r3|%p5, -1;
        selp.u32 %r4, 1, 0, %p5;
        redux.sync.add.u32 %r4, %r4, -1; st.global.u32 [%out+32], %r4;
        """,
        out=36,
    )
    assert result.values("out").tolist() == [0x44444444, 1, 0, 0, 496, 3, 0x44444444, 0, 1]


def test_each_half_of_a_warp_may_meet_for_itself():
    """Masks of halves are legal, in one instruction and in two."""
    result = clean(
        """
        setp.lt.u32 %p1, %t, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;
        vote.sync.ballot.b32 %r2, %p1, %r1;
        mov.u32 %r0, %r2;
        @%p1 bra LOW;
        redux.sync.add.u32 %r3, %t, 0xffff0000;
        bra END;
        LOW: redux.sync.add.u32 %r3, %t, 0xffff;
        END: add.u32 %r0, %r0, %r3;
        """
        + STORE,
        out=128,
    )
    assert (result.values("out") == np.where(LANE < 16, 0xFFFF + 120, 376)).all()


def test_lanes_arrive_one_after_the_other():
    """A rendezvous waits for lanes that are still on another way."""
    result = clean(
        """
        mov.u32 %r1, 0;
        LOOP: setp.ge.u32 %p1, %r1, %t; @%p1 bra OUT;
        add.u32 %r1, %r1, 1; bra LOOP;
        OUT: redux.sync.add.u32 %r0, %r1, -1;
        """
        + STORE,
        out=128,
    )
    assert (result.values("out") == 496).all()


def test_lanes_may_meet_at_different_warp_barriers():
    body = """
    mov.u32 %r1, dynamic; mad.lo.u32 %r2, %t, 4, %r1; xor.b32 %r3, %t, 16; mad.lo.u32 %r3, %r3, 4, %r1;
    mov.u32 %r4, -1; setp.lt.u32 %p1, %t, 16; @%p1 bra LOW;
    st.shared.u32 [%r2], %t;
    bar.warp.sync %r4;
    ld.shared.u32 %r0, [%r3];
    bra END;
    LOW: st.shared.u32 [%r2], %t; st.shared.u32 [%r2], %t;
    bar.warp.sync {mask};
    ld.shared.u32 %r0, [%r3];
    END: """
    for text in (body, body.replace("bar.warp.sync %r4", "bar.warp.sync -1")):
        result = clean(text.format(mask="%r4" if text is body else -1) + STORE, shared=128, out=128)
        assert (result.values("out") == (LANE ^ 16)).all()
    result = run(body.format(mask=0xFFFF) + STORE, shared=128, out=128)
    assert {(report.kind, report.line) for report in result.reports} >= {(Kind.MEMBER_MASK, 4)}


def test_a_lane_of_the_mask_that_is_elsewhere():
    body = """
    setp.lt.u32 %p1, %t, 16;
    @%p1 bra LOW;
    redux.sync.add.u32 %r1, %t, -1;
    bra END;
    LOW: redux.sync.add.u32 %r1, %t, 0xffff;
    END: mov.u32 %r2, 0;
    """
    for seed in range(3):
        report = run(body, seed=seed).only(Kind.MEMBER_MASK, 3)
        assert "lanes 16-31" in report.where and "0-15" in report.detail


def test_a_lane_of_the_mask_that_has_exited():
    report = run("setp.eq.u32 %p1, %t, 9;\n@%p1 exit;\nvote.sync.ballot.b32 %r1, %p1, -1;").only(Kind.MEMBER_MASK, 3)
    assert "lanes 9 have exited" in report.detail


def test_a_lane_that_isn_t_in_its_own_mask():
    report = run("vote.sync.any.pred %p1, 1, 0xffff;").only(Kind.MEMBER_MASK, 1)
    assert "lanes 16-31" in report.where


def test_a_shuffle_from_a_lane_outside_the_mask():
    body = "setp.lt.u32 %p1, %t, 16;\n@%p1 shfl.sync.bfly.b32 %r1, %t, {0}, 31, 0xffff;"
    assert not run(body.format(8)).reports
    report = run(body.format(16)).only(Kind.MEMBER_MASK, 2)
    assert "gets the value of lane 16" in report.detail


def test_a_full_mask_in_a_short_warp_is_all_of_it():
    clean("vote.sync.ballot.b32 %r0, 1, -1;\nbar.warp.sync -1;\n" + STORE, block=20, out=80)


def test_divergence_at_an_aligned_instruction():
    body = "setp.lt.u32 %p1, %t, 16;\n@%p1 bar.sync 0;\nmov.u32 %r1, 0;"
    report = run(body).only(Kind.DIVERGENCE, 2)
    assert "lanes 0-15" in report.where and "lanes 16-31 have exited" in report.detail


def test_divergence_at_an_aligned_instruction_when_lanes_have_exited():
    body = "setp.eq.u32 %p1, %t, 3;\n@%p1 exit;\nbar.sync 0;"
    report = run(body).only(Kind.DIVERGENCE, 3)
    assert "lanes 3 have exited" in report.detail


def test_lanes_may_reach_an_aligned_instruction_at_different_times():
    clean("setp.lt.u32 %p1, %t, 16;\n@%p1 bra A;\nmov.u32 %r1, 0; mov.u32 %r1, 1;\nA: bar.sync 0;", block=64)


def test_two_barriers_on_two_ways_of_one_warp_are_divergence():
    body = "setp.lt.u32 %p1, %t, 16;\n@%p1 bra A;\nbar.sync 0;\nbra END;\nA: bar.sync 1, 32;\nEND: mov.u32 %r1, 0;"
    result = run(body)
    assert Kind.DIVERGENCE in result.kinds()
    assert {report.line for report in result.reports if report.kind == Kind.DIVERGENCE} == {3, 5}


def test_a_predicated_uniform_barrier_is_fine():
    clean("setp.lt.u32 %p1, %t, 32;\n@%p1 bar.sync 1, 32;\n@!%p1 bar.sync 2, 64;", block=96)


def test_special_registers():
    result = clean(
        """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %t;
        mov.u32 %r4, %laneid; mov.u32 %r5, %lanemask_lt; popc.b32 %r5, %r5;
        sub.u32 %r4, %r4, %r5;
        mov.u32 %r6, %nctaid.x; mov.u32 %r7, %tid.y; mov.u32 %r8, %ntid.z;
        add.u32 %r0, %r3, %r4; mad.lo.u32 %r0, %r6, 1000, %r0;
        add.u32 %r0, %r0, %r7; mad.lo.u32 %r0, %r8, 10000, %r0;
        mul.wide.u32 %d0, %r3, 4; add.s64 %d0, %out, %d0; st.global.u32 [%d0], %r0;
        mov.u64 %d1, %clock64; mov.u32 %r9, %lanemask_ge; mov.u32 %r9, %lanemask_eq;
        """,
        grid=3,
        block=48,
        out=4 * 144,
    )
    assert (result.values("out") == 13000 + np.arange(144)).all()
