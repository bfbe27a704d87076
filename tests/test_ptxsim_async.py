"""mbarriers, bulk copies, cp.async and setmaxnreg as the interpreter's warps execute them."""

import numpy as np
import pytest
from ptxsim import Kind, UnsupportedInstruction
from ptxsim_text import STORE, clean, run

DATA = np.arange(64, dtype=np.uint32) + 7

BARRIER = """
    mov.u32 %r1, dynamic; add.u32 %r2, %r1, 512; setp.ne.u32 %p1, %t, 0;
    @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    MADE: bar.sync 0;
"""
LOAD = """
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%x], 256, [%r2];
    LOADED:
"""
WAIT = """
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
"""
READ = "mad.lo.u32 %r3, %t, 4, %r1; ld.shared.u32 %r0, [%r3];" + STORE


def one_thread(body: str) -> str:
    return BARRIER + "@%p1 bra DONE;\n" + body + "\nDONE:\n"


# ------------------------------------------------------------------------------------------------------------ mbarriers


def test_a_bulk_load_and_a_wait():
    result = clean(BARRIER + LOAD + WAIT + READ, block=64, shared=520, x=DATA, out=256)
    assert (result.values("out") == DATA).all() and result.machine.counters.bulk_loaded == 256


@pytest.mark.parametrize("hint", ["evict_first", "evict_last"])
def test_cache_hints(hint):
    load = LOAD.replace("complete_tx::bytes", "complete_tx::bytes.L2::cache_hint").replace(
        "256, [%r2]", "256, [%r2], %d1"
    )
    body = BARRIER + f"createpolicy.fractional.L2::{hint}.b64 %d1, 1.0;" + load + WAIT + READ
    assert (clean(body, block=64, shared=520, x=DATA, out=256).values("out") == DATA).all()


def test_generic_addresses_of_barriers():
    body = BARRIER + LOAD
    body += "cvt.u64.u32 %d5, %r2; cvta.shared.u64 %d5, %d5;" + WAIT.replace("shared::cta.", "").replace("%r2", "%d5")
    assert (clean(body + READ, block=64, shared=520, x=DATA, out=256).values("out") == DATA).all()


def test_states_and_counts():
    """Two arrivals a phase; a token of arrive waits for its own phase."""
    body = """
    mov.u32 %r2, dynamic; setp.ne.u32 %p1, %t, 0; @%p1 bra MADE;
    mbarrier.init.shared::cta.b64 [%r2], 3;
    MADE: bar.sync 0; setp.ge.u32 %p1, %t, 1; @%p1 bra OTHERS;
    mbarrier.arrive.shared::cta.b64 %d5, [%r2], 2;
    mbarrier.pending_count.b64 %r0, %d5;
    mbarrier.test_wait.shared::cta.b64 %p3, [%r2], %d5; selp.u32 %r4, 100, 0, %p3;
    FIRST: mbarrier.try_wait.shared::cta.b64 %p2, [%r2], %d5; @!%p2 bra FIRST;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 0; selp.u32 %r5, 10, 0, %p3;
    add.u32 %r0, %r0, %r5; st.global.u32 [%out], %r0; bra DONE;
    OTHERS: setp.ne.u32 %p1, %t, 32; @%p1 bra DONE;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2];
    DONE:
    """
    # Pending before this arrival: 3, or 2 when the other thread was first.
    assert clean(body, block=64, shared=8, out=4).values("out")[0] in (12, 13)


def test_a_dropped_arrival_isn_t_expected_again():
    body = one_thread("""
    mbarrier.inval.shared::cta.b64 [%r2];
    mbarrier.init.shared::cta.b64 [%r2], 2;
    mbarrier.arrive_drop.shared::cta.b64 _, [%r2];
    mbarrier.arrive.shared::cta.b64 _, [%r2];
    mbarrier.arrive.shared::cta.b64 _, [%r2];
    TWICE: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra TWICE;
    """)
    clean(body, shared=520)


def test_what_was_written_before_an_arrival_is_seen_after_the_wait():
    """…and with a relaxed arrival or a relaxed wait it isn't."""
    body = """
    setp.lt.u32 %p3, %t, 32; @!%p3 bra CONSUME;
    st.shared.u32 [%r1], 5;
    @!%p1 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2];
    bra DONE;
    CONSUME: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra CONSUME;
    ld.shared.u32 %r0, [%r1];
    DONE:
    """
    body = BARRIER + body.replace("st.shared.u32 [%r1], 5;", "@!%p1 st.shared.u32 [%r1], 5;")
    clean(body, block=64, shared=520)
    for order in ("release", "acquire"):
        weak = body.replace(f"{order}.cta", "relaxed.cta")
        assert run(weak, block=64, shared=520).kinds() == {Kind.RACE}


@pytest.mark.parametrize(
    "body, detail",
    [
        ("mbarrier.init.shared::cta.b64 [%r1], 0;", "init with 0 arrivals"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r2], 2;", "arrival of 2 with 1 pending"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %d1, [%r2], 1;", "noComplete"),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 2000000;", "tx-count"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r1];", "no mbarrier was initialised"),
        ("st.shared.u32 [%r2], 1; mbarrier.arrive.shared::cta.b64 _, [%r2];", "was overwritten"),
    ],
)
def test_misuse_of_mbarriers(body, detail):
    reports = run(one_thread(body), shared=520).reports
    assert any(report.kind == Kind.MBARRIER and detail in report.detail for report in reports), reports


def test_a_misaligned_mbarrier():
    assert Kind.MISALIGNED in run(one_thread("mbarrier.init.shared::cta.b64 [%r1+4], 1;"), shared=520).kinds()


def test_a_wait_for_ever_is_pictured():
    report = run(BARRIER + WAIT, block=64, shared=520).reports[0]
    assert report.kind == Kind.DEADLOCK
    for text in (
        "CTA 0 warp 1, 32 lanes",
        "mbarrier.try_wait",
        "mbarrier at byte 512",
        "phase 0",
        "pending 1 of 1, tx 0",
    ):
        assert text in report.detail


def test_a_wait_that_isn_t_tried_again():
    """Works most times, on a GPU too."""
    once = BARRIER + LOAD + "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;" + READ
    kinds = [run(once, block=64, shared=520, x=DATA, out=256, seed=seed).kinds() for seed in range(40)]
    assert {Kind.RACE} <= set().union(*kinds) and set() in kinds


def test_polling_by_test_wait_ends():
    body = BARRIER + LOAD + WAIT.replace("try_wait", "test_wait") + READ
    assert (clean(body, block=64, shared=520, x=DATA, out=256).values("out") == DATA).all()


# --------------------------------------------------------------------------------------------------------------- copies

FILL = """
    mov.u32 %r1, dynamic; setp.ne.u32 %p1, %t, 0;
    mad.lo.u32 %r3, %t, 4, %r1; st.shared.u32 [%r3], %t;
    fence.proxy.async.shared::cta; bar.sync 0;
"""
BULK_STORE = """
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
"""


def test_a_bulk_store():
    result = clean(FILL + BULK_STORE, block=64, shared=256, out=256)
    assert (result.values("out") == np.arange(64)).all() and result.machine.counters.bulk_stored == 256


def test_a_store_may_go_on_after_the_end_once_its_source_was_read():
    body = FILL + BULK_STORE.replace("wait_group 0", "wait_group.read 0")
    assert (clean(body, block=64, shared=256, out=256).values("out") == np.arange(64)).all()


def test_newer_groups_may_be_pending():
    body = (
        FILL
        + """
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 128; cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%out+128], [%r1+128], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 1;
    st.shared.u32 [%r1], 1;
    cp.async.bulk.wait_group.read 0;
    st.shared.u32 [%r1+128], 1;
    DONE:
    """
    )
    clean(body, block=64, shared=256, out=256)
    early = body.replace("wait_group.read 1", "wait_group.read 2")
    assert run(early, block=64, shared=256, out=256).kinds() == {Kind.RACE}


@pytest.mark.parametrize(
    "change, kind",
    [
        (("[%out], [%r1], 256", "[%out], [%r1], 250"), Kind.MISALIGNED),
        (("[%out], [%r1], 256", "[%out], [%r1+8], 192"), Kind.MISALIGNED),
        (("[%out], [%r1], 256", "[%out+16], [%r1], 256"), Kind.OUT_OF_BOUNDS),
        (("[%out], [%r1], 256", "[%out], [%r1+16], 256"), Kind.OUT_OF_BOUNDS),
        (("wait_group 0", "wait_group 1"), Kind.PENDING_AT_EXIT),
        (("cp.async.bulk.commit_group;", ""), Kind.PENDING_AT_EXIT),
    ],
)
def test_misuse_of_bulk_stores(change, kind):
    reports = run(FILL + BULK_STORE.replace(*change), block=64, shared=256, out=256).reports
    assert [report.kind for report in reports] == [kind], reports


@pytest.mark.parametrize("write", ["st.volatile.shared.u32 [%r3], %t;", "atom.shared.add.u32 %r4, [%r3], 1;"])
def test_strong_writes_need_the_proxy_fence_too(write):
    body = FILL.replace("st.shared.u32 [%r3], %t;", "st.shared.u32 [%r3], %t; fence.proxy.async.shared::cta;" + write)
    clean(body + BULK_STORE, block=64, shared=256, out=256)
    unfenced = body.replace("fence.proxy.async.shared::cta; bar.sync", "bar.sync")
    assert run(unfenced + BULK_STORE, block=64, shared=256, out=256).kinds() == {Kind.PROXY}


def test_strong_reads_race_with_plain_writes_only():
    read = "ld.volatile.shared.u32 %r5, [%r1];"
    clean(FILL + BULK_STORE.replace("cp.async.bulk.wait", read + "cp.async.bulk.wait"), block=64, shared=256, out=256)
    both = "setp.lt.u32 %p1, %t, 32; @%p1 bra A; ld.global.u32 %r0, [%x]; bra E; A: {} E:"
    clean(both.format("ld.volatile.global.u32 %r0, [%x];"), block=64, x=DATA)
    for one in ("ld.relaxed.gpu.global.u32 %r0, [%x];", "ld.volatile.global.u32 %r0, [%x];"):
        text = both.replace("ld.global.u32 %r0, [%x]", "st.global.u32 [%x], 1").format(one)
        assert run(text, block=64, x=DATA).kinds() == {Kind.RACE}


def test_a_store_to_read_only_memory():
    assert run(FILL + BULK_STORE, block=64, shared=256, readonly=("out",), out=DATA).kinds() == {Kind.READ_ONLY}


def test_an_out_of_bounds_load_is_one_report_and_no_deadlock():
    body = BARRIER + LOAD.replace("[%x]", "[%x+16]") + WAIT
    assert [r.kind for r in run(body, block=64, shared=520, x=DATA).reports] == [Kind.OUT_OF_BOUNDS]


def test_two_loads_into_the_same_bytes_race():
    twice = LOAD.replace("_, [%r2], 256", "_, [%r2], 512").replace(
        "    LOADED:",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%x], 256, [%r2];LOADED:",
    )
    assert run(BARRIER + twice + WAIT, block=64, shared=520, x=DATA).kinds() == {Kind.RACE}


def test_prefetch():
    clean("cp.async.bulk.prefetch.L2.global [%x], 256;", x=DATA)
    assert run("cp.async.bulk.prefetch.L2.global [%x], 272;", x=DATA).kinds() == {Kind.OUT_OF_BOUNDS}
    assert run("cp.async.bulk.prefetch.L2.global [%x], 40;", x=DATA).kinds() == {Kind.MISALIGNED}


CP_ASYNC = """
    mov.u32 %r1, dynamic; mad.lo.u32 %r3, %t, 4, %r1; mul.wide.u32 %d1, %t, 4; add.s64 %d1, %x, %d1;
    cp.async.ca.shared.global [%r3], [%d1], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.u32 %r0, [%r3];
"""


def test_cp_async():
    assert (clean(CP_ASYNC + STORE, block=64, shared=256, x=DATA, out=256).values("out") == DATA).all()
    everything = CP_ASYNC.replace("cp.async.commit_group;", "").replace("wait_group 0", "wait_all")
    assert (clean(everything + STORE, block=64, shared=256, x=DATA, out=256).values("out") == DATA).all()
    zeros = CP_ASYNC.replace("[%d1], 4;", "[%d1], 4, 0;") + STORE
    assert (clean(zeros, block=64, shared=256, x=DATA, out=256).values("out") == 0).all()


@pytest.mark.parametrize("wait", ["wait_group 1", "wait_group 5"])
def test_cp_async_read_before_it_is_there(wait):
    kinds = run(CP_ASYNC.replace("wait_group 0", wait), block=64, shared=256, x=DATA).kinds()
    assert kinds & {Kind.RACE, Kind.UNINITIALISED_MEMORY}


# Each thread copies its word twice, in two groups, to places 256 bytes apart.
TWO_GROUPS = CP_ASYNC.replace(
    "cp.async.wait_group 0;",
    "cp.async.ca.shared.global [%r3+256], [%d1], 4; cp.async.commit_group; cp.async.wait_group {};",
)


def test_groups_of_cp_async_are_waited_for_in_order():
    assert (
        clean(TWO_GROUPS.format(1) + "cp.async.wait_group 0;" + STORE, block=64, shared=512, x=DATA, out=256)
    ).values("out").tolist() == DATA.tolist()
    newer = TWO_GROUPS.format(1).replace("ld.shared.u32 %r0, [%r3]", "ld.shared.u32 %r0, [%r3+256]")
    for seed in range(8):
        found = run(newer + "cp.async.wait_group 0;", block=64, shared=512, seed=seed, x=DATA).kinds()
        assert found and found <= {Kind.RACE, Kind.UNINITIALISED_MEMORY}
    assert run(TWO_GROUPS.format(1), block=64, shared=512, x=DATA).kinds() == {Kind.PENDING_AT_EXIT}


def test_other_threads_need_more_than_a_wait():
    neighbour = CP_ASYNC.replace("ld.shared", "{} xor.b32 %r4, %t, 1; mad.lo.u32 %r3, %r4, 4, %r1; ld.shared") + STORE
    assert (
        clean(neighbour.format("bar.warp.sync -1;"), block=64, shared=256, x=DATA, out=256).values("out")[::2]
        == DATA[1::2]
    ).all()
    assert run(neighbour.format(""), block=64, shared=256, x=DATA, out=256).kinds() == {Kind.RACE}


def test_two_cp_async_of_a_thread_to_the_same_bytes_race():
    same = TWO_GROUPS.format(0).replace("+256", "")
    assert run(same, block=64, shared=512, x=DATA).kinds() == {Kind.RACE}
    waited = same.replace("cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 0;")
    clean(waited, block=64, shared=512, x=DATA)


def test_a_part_of_the_source_and_nothing_behind_it():
    """10 of 16 bytes in lane 1, none in lane 2, which points nowhere."""
    body = """
    mov.u32 %r1, dynamic; mad.lo.u32 %r3, %t, 16, %r1; mul.wide.u32 %d1, %t, 16; add.s64 %d1, %x, %d1;
    setp.gt.u32 %p1, %t, 2; @%p1 bra DONE;
    mul.lo.u32 %r4, %t, 6; sub.u32 %r4, 16, %r4; setp.eq.u32 %p1, %t, 2; selp.u32 %r4, 0, %r4, %p1;
    cp.async.cg.shared.global [%r3], [%d1], 16, %r4;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r3]; add.s64 %d2, %out, %d1; sub.s64 %d2, %d2, %x;
    st.global.v4.u32 [%d2], {%r5, %r6, %r7, %r8};
    DONE:
    """
    x = np.arange(1, 27, dtype=np.uint8)
    got = clean(body, block=32, shared=512, x=x, out=48).values("out", np.uint8)
    assert (got[:26] == x).all() and not got[26:].any()
    assert run(body, block=32, shared=512, x=x[:25], out=48).kinds() == {Kind.OUT_OF_BOUNDS}


def test_what_is_not_known_is_named():
    with pytest.raises(UnsupportedInstruction, match="cp.reduce"):
        run("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%x], [%r1], 16;", x=DATA)
    with pytest.raises(UnsupportedInstruction, match="multicast"):
        run(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%r1], [%x], 256, [%r2], %r3;",
            x=DATA,
        )


# ----------------------------------------------------------------------------------------------------------- setmaxnreg


def test_setmaxnreg_needs_launch_bounds_and_allowed_counts():
    assert run("setmaxnreg.dec.sync.aligned.u32 40;", block=128).kinds() == {Kind.REGISTER_POOL}
    reports = run("setmaxnreg.dec.sync.aligned.u32 20;", block=128).reports
    assert any("24 to 256" in report.detail for report in reports)


def test_cp_async_with_a_cache_policy():
    """…which is no size of the source."""
    policy = "createpolicy.fractional.L2::evict_last.b64 %d2, 1.0;"
    hinted = policy + CP_ASYNC.replace(
        "shared.global [%r3], [%d1], 4;", "shared.global.L2::cache_hint [%r3], [%d1], 4, %d2;"
    )
    assert (clean(hinted + STORE, block=64, shared=256, x=DATA, out=256).values("out") == DATA).all()


# ----------------------------------------------------------------------------------------------------- dependent launch


def test_who_never_waits_for_the_earlier_launch_is_told():
    for body, kinds in (("griddepcontrol.launch_dependents;", {Kind.DEPENDENT}), ("griddepcontrol.wait;", set())):
        result = run(body, programmatic=True)
        assert result.kinds() == kinds
        assert run(body).kinds() == set()
        if kinds:
            assert "no thread executes griddepcontrol.wait" in result.reports[0].detail


@pytest.mark.parametrize(
    "load, free",
    [
        ("ld.global.u32", False),
        ("ld.global.nc.u32", False),
        ("ld.volatile.global.u32", True),
        ("ld.relaxed.gpu.global.u32", True),
        ("ld.acquire.gpu.global.u32", True),
    ],
)
def test_loads_before_the_wait(load, free):
    body = f"{load} %r0, [%x]; cp.async.bulk.prefetch.L2.global [%x], 256; griddepcontrol.wait; {load} %r0, [%x];"
    for readonly in ((), ("x",)):  # nobody says that the earlier launch doesn't write it
        assert run(body, programmatic=True, readonly=readonly, x=DATA).kinds() == (set() if free else {Kind.DEPENDENT})


def test_constants_of_a_module_are_free_before_the_wait():
    variables = ".const .align 4 .b8 numbers[4] = {1, 2, 3, 4};\n.global .align 4 .u32 counter[1];"
    body = "ld.const.u32 %r0, [numbers]; ld.global.u32 %r0, [counter]; griddepcontrol.wait;"
    reports = run(body, programmatic=True, declarations=variables).reports
    assert [report.kind for report in reports] == [Kind.DEPENDENT] and "counter" in reports[0].detail
