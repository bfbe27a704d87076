"""Launches: residency, barriers with counts, deadlocks, budgets, aborts, and what the reports say."""

import numpy as np
import pytest
from ptxsim import KernelReport, Kind, Machine, parse_ptx
from ptxsim.checks import lanes_text
from ptxsim_text import STORE, clean, module_text, run


def test_a_report_is_an_exception_that_names_place_and_instruction():
    module = parse_ptx(module_text("add.s64 %d1, %x, 128;\nst.global.u32 [%d1], %t;", ("x",)))
    machine = Machine()
    x = machine.allocate(128, "weights")
    arguments = np.array([x.base], np.uint64).tobytes()
    with pytest.raises(KernelReport) as error:
        machine.launch(module.kernels["k"], 1, 32, 0, arguments)
    text = str(error.value)
    for part in (
        "out of bounds",
        "test.cu:2",
        "st.global.u32 [%d1], %t",
        "CTA 0 warp 0 lanes 0-31",
        "byte 128 of weights",
    ):
        assert part in text
    assert error.value.kinds() == {Kind.OUT_OF_BOUNDS}


def test_the_same_report_is_counted():
    report = run("mov.u64 %d1, 0;\nst.global.u32 [%d1], %t;", grid=3, block=64, x=4).only(Kind.OUT_OF_BOUNDS, 2)
    assert report.count == 6 and "6 times" in str(report)


def test_lanes_text():
    assert lanes_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize(
    ("grid", "block", "shared", "extra", "words"),
    [
        (0, 32, 0, b"", "grid of 0"),
        (1, 0, 0, b"", "block of 0"),
        (1, 1025, 0, b"", "block of 1025: 1 to 1024"),
        (1, 32, 228 * 1024, b"", "bytes of shared memory"),
        (1, 32, 0, b"1234", "4 bytes of arguments: the kernel has 0"),
    ],
)
def test_launches_that_a_gpu_refuses(grid, block, shared, extra, words):
    kernel = parse_ptx(module_text("")).kernels["k"]
    (report,) = Machine().launch(kernel, grid, block, shared, extra, check=False)
    assert report.kind == Kind.LAUNCH and words in report.detail


def test_launch_bounds_of_the_kernel():
    kernel = parse_ptx(module_text("").replace("\n)\n{", "\n)\n.maxntid 64, 1, 1\n{")).kernels["k"]
    assert kernel.max_threads == 64
    assert Machine().launch(kernel, 1, 64) == []
    (report,) = Machine().launch(kernel, 1, 96, check=False)
    assert "1 to 64 threads" in report.detail


def test_more_ctas_than_fit():
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %t, %r1, %r2, %t; mov.u32 %r0, %t;\n" + STORE
    result = clean(body, grid=9, block=512, shared=100_000, out=4 * 9 * 512)
    assert (result.values("out") == np.arange(9 * 512)).all()


def test_ctas_run_at_the_same_time():
    """Two that wait for each other only end if they do."""
    body = """
    mov.u32 %r1, %ctaid.x; xor.b32 %r2, %r1, 1;
    mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %x, %d1; mul.wide.u32 %d2, %r2, 4; add.s64 %d2, %x, %d2;
    st.release.gpu.global.u32 [%d1], 1;
    SPIN: ld.acquire.gpu.global.u32 %r3, [%d2]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SPIN;
    """
    clean(body, grid=2, block=32, x=np.zeros(2, np.uint32))


def test_seeds_change_the_order_and_nothing_else():
    body = "bar.sync 0; atom.global.add.u32 %r0, [%x], 1;\n" + STORE
    orders = [run(body, block=128, seed=seed, x=np.zeros(1, np.uint32), out=512).values("out") for seed in (0, 1, 0)]
    assert (orders[0] == orders[2]).all() and (orders[0] != orders[1]).any()
    assert (np.sort(orders[1]) == np.arange(128)).all()


def test_barriers_that_reduce():
    result = clean(
        """
        and.b32 %r1, %t, 3; setp.eq.u32 %p1, %r1, 1;
        bar.red.popc.u32 %r0, 0, %p1;
        bar.red.and.pred %p2, 0, %p1; @%p2 add.u32 %r0, %r0, 1000;
        bar.red.or.pred %p3, 0, !%p1; @%p3 add.u32 %r0, %r0, 2000;
        """
        + STORE,
        block=128,
        out=512,
    )
    assert (result.values("out") == 2032).all()


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("bar.sync 16;", "barrier 16: there are 16"),
        ("bar.sync 1, 40;", "a count of 40: it must be a multiple of 32"),
        ("bar.sync 1, 0;", "a count of 0"),
        ("bar.sync 1, 96;", "a count of 96: the CTA has 64 threads"),
    ],
)
def test_barriers_with_impossible_operands(instruction, words):
    result = run(instruction, block=64)
    reports = [report for report in result.reports if report.kind == Kind.BARRIER]
    assert any(words in report.detail and report.line == 1 for report in reports)


def test_two_counts_for_one_barrier():
    body = "setp.lt.u32 %p1, %t, 32;\nselp.b32 %r1, 64, 96, %p1;\nbar.sync 1, %r1;"
    report = run(body, block=64).reports[0]
    assert report.kind == Kind.BARRIER and report.line == 3 and "count of" in report.detail


def test_more_arrivals_than_a_barrier_expects():
    """Three warps at a barrier for two: the third begins a new round, and waits for ever."""
    result = run("bar.sync 1, 64;", block=96)
    result.only(Kind.DEADLOCK, 1)


def test_a_barrier_that_warps_have_left_by_exiting():
    body = "setp.ge.u32 %p1, %t, 64;\n@%p1 exit;\nbar.sync 0;"
    report = run(body, block=96).only(Kind.BARRIER, 3)
    assert "warps 2 have exited" in report.detail
    # With a count there is no doubt.
    clean(body.replace("bar.sync 0;", "bar.sync 0, 64;"), block=96)


def test_a_barrier_with_an_arrival_at_the_end():
    body = "setp.lt.u32 %p1, %t, 32;\n@%p1 bar.arrive 1, 64;"
    report = run(body, block=64).only(Kind.BARRIER, 2)
    assert "the CTA exits while barrier 1: 32 of 64 threads have arrived" in report.detail


def test_a_deadlock_says_who_waits_for_what():
    body = "setp.lt.u32 %p1, %t, 32; @%p1 bra A;\nbar.sync 1, 64;\nbra END;\nA: bar.sync 2, 64;\nEND: mov.u32 %r1, 0;"
    result = run(body, block=64)
    assert result.kinds() == {Kind.DEADLOCK}
    text = str(result.reports[0])
    for part in (
        "CTA 0 warp 0, 32 lanes: blocked at test.cu:4: bar.sync 2, 64",
        "CTA 0 warp 1, 32 lanes: blocked at test.cu:2: bar.sync 1, 64",
        "barrier 1: 32 of 64 threads have arrived",
        "barrier 2: 32 of 64 threads have arrived",
    ):
        assert part in text


@pytest.mark.parametrize(
    "body",
    [
        "L: bra L;",
        "L: ld.volatile.global.u32 %r1, [%x]; setp.eq.u32 %p1, %r1, 0; @%p1 bra L;",
        "L: nanosleep.u32 20; bra L;",
    ],
)
def test_endless_loops_end(body):
    report = run(body, x=np.zeros(1, np.uint32)).only(Kind.STEP_BUDGET, 1)
    assert "more than 20000 warp instructions" in report.detail


def test_traps_and_failed_assertions():
    body = "setp.eq.u32 %p1, %t, 5;\n@%p1 trap;\nst.global.u32 [%x], 1;"
    result = run(body, x=np.zeros(1, np.uint32))
    assert result.only(Kind.TRAP, 2).where.endswith("lane 5") and result.values("x")[0] == 0
    declarations = (
        ".extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);\n"
        ".global .align 1 .b8 message[6] = {97, 46, 110, 62, 51};\n.global .align 1 .b8 file[5] = {99, 46, 99, 117};"
    )
    body = """
    setp.eq.u32 %p1, %t, 5;
    @!%p1 bra END;
    mov.u64 %d1, message; mov.u64 %d2, file;
    {
    .param .b64 param0; st.param.b64 [param0+0], %d1;
    .param .b64 param1; st.param.b64 [param1+0], %d2;
    .param .b32 param2; st.param.b32 [param2+0], 77;
    .param .b64 param3; st.param.b64 [param3+0], %d2;
    .param .b64 param4; st.param.b64 [param4+0], 1;
    call.uni __assertfail, (param0, param1, param2, param3, param4);
    }
    END: mov.u32 %r1, 0;
    """
    report = run(body, declarations=declarations).only(Kind.ASSERTION, 10)
    assert "a.n>3 at c.cu:77" in report.detail


def test_budget_and_reports_don_t_stay():
    machine = Machine(step_budget=100)
    kernel = parse_ptx(module_text("mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 20; @%p1 bra L;"))
    for _ in range(3):
        assert machine.launch(kernel.kernels["k"], 1, 32) == []
