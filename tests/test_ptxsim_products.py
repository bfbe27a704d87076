"""wgmma, mma.sync, ldmatrix and stmatrix on the interpreter: small whole numbers, so that sums are exact."""

import numpy as np
import pytest
from ptxsim import Kind
from ptxsim_layouts import descriptor, flat, swizzled
from ptxsim_text import clean, run

K, T = 16, 8  # of 16-bit elements: a wgmma's depth, and how many are 16 bytes
# descriptor mode -> (bits of the swizzle, 16-byte units of a pattern's row)
MODES = {0: (0, 1), 1: (3, 8), 2: (2, 4), 3: (1, 2)}


def to_bits(values: np.ndarray, element: str) -> np.ndarray:
    if element == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def image(matrix: np.ndarray, mode: int, mn_major: bool) -> tuple[np.ndarray, int, int]:
    """uint16 [mn, 16] as bytes of shared memory, and the encoded leading and stride offsets."""
    rows = len(matrix)
    bits, units = MODES[mode]
    row, block = units * T, 8 * units * T  # elements of a pattern's row, and of its 8 rows
    if mn_major:
        groups = -(-rows // row)
        shape = ((T, units, groups), (8, 2))
        stride, leading = (2 * block, block) if mode == 0 else (block, 2 * block)
        strides = ((1, T, stride), (T, leading)) if mode == 0 else ((1, T, leading), (row, stride))
        size = 2 * block * groups
    else:
        groups = rows // 8
        shape = ((8, groups), (T, 2))
        stride, leading = (2 * block, block) if mode == 0 else (block, 8)
        strides = ((row, stride), (1, leading if mode == 0 else T))
        size = stride * groups
    content = np.zeros(size, np.uint16)
    for mn in range(rows):
        for k in range(K):
            element = flat(shape[0], strides[0], mn) + flat(shape[1], strides[1], k)
            content[swizzled(bits, element, 2) >> 1] = matrix[mn, k]
    return content, 2 * leading >> 4, 2 * stride >> 4


def accumulator_place(thread: int, register: int, n: int) -> tuple[int, int]:
    """(row, column) in 64 × n."""
    place = flat((4, 8, 4), (128, 1, 16), thread) + flat((2, 2, n // 8), (64, 8, 512), register)
    return place % 64, place // 64


def operand_place(thread: int, register: int, half: int) -> tuple[int, int]:
    """(row, k) in 64 × 16."""
    place = flat((4, 8, 4), (128, 1, 16), thread) + flat((2, 2, 2), (64, 8, 512), half + 2 * register)
    return place % 64, place // 64


def offset(x: int) -> int:
    """Where B's image starts: on a whole pattern behind A's."""
    return -(-x // 1024) * 1024


def wgmma_body(n: int, element: str, a_bytes: int, b_bytes: int, of_a, of_b, registers: bool, tail: str) -> str:
    """All copies by thread 0; then D = A · B + D, with D and A's registers from global memory."""
    to_b = offset(a_bytes)
    barrier = to_b + offset(b_bytes)
    accumulators = ", ".join(f"%acc{i}" for i in range(n // 2))
    base = 1024  # of dynamic shared memory here: descriptors hold absolute addresses
    a = "{%a0, %a1, %a2, %a3}" if registers else "%d20"
    loads = "".join(f"ld.global.f32 %acc{i}, [%d1+{4 * i}];\n" for i in range(n // 2))
    stores = "".join(f"st.global.f32 [%d2+{4 * i}], %acc{i};\n" for i in range(n // 2))
    return f"""
    .reg .f32 %acc<{n // 2}>; .reg .b32 %a<4>;
    mov.u32 %r1, dynamic; add.u32 %r2, %r1, {to_b}; add.u32 %r3, %r1, {barrier};
    setp.ne.u32 %p1, %t, 0; @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {a_bytes + b_bytes};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a], {a_bytes}, [%r3];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%b], {b_bytes}, [%r3];
    READY: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    mul.wide.u32 %d0, %t, {2 * n}; add.s64 %d1, %c, %d0; add.s64 %d2, %out, %d0;
    {loads}
    mul.wide.u32 %d3, %t, 16; add.s64 %d3, %operand, %d3;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%d3];
    mov.u64 %d20, {descriptor(*of_a, start=base)}; mov.u64 %d21, {descriptor(*of_b, start=base + to_b)};
    setp.ne.u32 %p3, {int(tail.startswith("add"))}, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {{{accumulators}}}, {a}, %d21, %p3, {tail[4:]};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    """


CASES = [
    # n, element, A from registers, (mode, MN-major) of A and of B, adds to D, scales
    (8, "bf16", False, (1, False), (1, False), True, (1, 1)),
    (24, "bf16", False, (0, False), (0, False), True, (1, 1)),
    (64, "bf16", True, (1, False), (1, False), True, (1, 1)),
    (256, "bf16", True, (1, False), (1, False), False, (1, 1)),
    (32, "f16", False, (2, False), (3, False), False, (-1, 1)),
    (16, "bf16", False, (3, False), (2, False), True, (1, -1)),
    (64, "bf16", False, (0, True), (0, True), True, (1, 1)),
    (128, "bf16", False, (1, True), (1, True), True, (-1, -1)),
    (64, "f16", False, (2, True), (3, True), True, (1, 1)),
    (16, "bf16", True, (1, False), (2, True), True, (1, 1)),
]


@pytest.mark.parametrize("n, element, registers, layout_a, layout_b, adds, scales", CASES)
def test_wgmma(n, element, registers, layout_a, layout_b, adds, scales):
    rng = np.random.default_rng(n)
    a, b = rng.integers(-8, 9, (64, K)), rng.integers(-8, 9, (n, K))
    c = rng.integers(-99, 100, (64, n))
    image_a, leading_a, stride_a = image(to_bits(a, element), *layout_a)
    image_b, leading_b, stride_b = image(to_bits(b, element), *layout_b)
    places = [accumulator_place(t, i, n) for t in range(128) for i in range(n // 2)]
    held = np.array([c[place] for place in places], np.float32)
    operand = np.array([a[operand_place(t, r, h)] for t in range(128) for r in range(4) for h in range(2)], np.float32)
    transposed = [int(layout_b[1])] if registers else [int(layout_a[1]), int(layout_b[1])]
    body = wgmma_body(
        n,
        element,
        image_a.nbytes,
        image_b.nbytes,
        (leading_a, stride_a, layout_a[0]),
        (leading_b, stride_b, layout_b[0]),
        registers,
        ("add " if adds else "new ") + ", ".join(map(str, (*scales, *transposed))),
    )
    shared = offset(image_a.nbytes) + offset(image_b.nbytes) + 8
    result = clean(
        body, block=128, shared=shared, a=image_a, b=image_b, c=held, operand=to_bits(operand, element), out=held.nbytes
    )
    expected = scales[0] * scales[1] * (a @ b.T) + adds * c
    assert (result.values("out", np.float32) == [expected[place] for place in places]).all()


def test_a_base_offset_is_refused():
    body = """
    .reg .f32 %acc<4>;
    mov.f32 %acc0, 0f00000000; mov.f32 %acc1, %acc0; mov.f32 %acc2, %acc0; mov.f32 %acc3, %acc0;
    mov.u64 %d0, 562949953421376; setp.eq.u32 %p1, %t, %t;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%acc0, %acc1, %acc2, %acc3}, %d0, %d0, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """
    assert "base offset 1" in run(body, block=128, shared=4096).only(Kind.WGMMA, 5).detail
    assert run(body, block=64, shared=4096).kinds() == {Kind.WGMMA}  # half a warpgroup


# ----------------------------------------------------------------------------------------------------- ldmatrix, mma


def shared_rows(count: int) -> str:
    """Lane l has row l of `count` 8 × 8 matrices in shared memory, at %r1 its own and at %r2 the first."""
    return f"""
    mul.wide.u32 %d0, %t, 16; add.s64 %d1, %x, %d0;
    setp.ge.u32 %p1, %t, {8 * count};
    mov.u32 %r2, dynamic; mad.lo.u32 %r1, %t, 16, %r2;
    mul.wide.u32 %d4, %t, {4 * count}; add.s64 %d4, %out, %d4;
    """


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count, transposed):
    x = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    body = (
        shared_rows(count)
        + f"""
    @%p1 bra LOADED;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d1]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
    LOADED: bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 {{{registers(count)}}}, [%r1];
    {"".join(f"st.global.b32 [%d4+{4 * i}], %r{10 + i};" for i in range(count))}
    """
    )
    got = clean(body, shared=512, x=x, out=128 * count).values("out").reshape(32, count)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for q in range(count):
            pair = x[q, column : column + 2, row] if transposed else x[q, row, column : column + 2]
            assert got[lane, q] == int(pair[0]) | int(pair[1]) << 16


def registers(count: int) -> str:
    return ", ".join(f"%r{10 + i}" for i in range(count))


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse(transposed):
    x = np.arange(256, dtype=np.uint16)
    suffix = ".trans" if transposed else ""
    body = (
        shared_rows(4)
        + f"""
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d1]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{{registers(4)}}}, [%r1];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r1+512], {{{registers(4)}}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1+512]; st.global.v4.b32 [%d4], {{%r4, %r5, %r6, %r7}};
    """
    )
    assert (clean(body, shared=1024, x=x, out=512).values("out", np.uint16) == x).all()


@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_mma(element):
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8)), rng.integers(-99, 100, (16, 8))
    held = np.zeros((32, 10), np.uint32)  # a lane's 4 registers of A, 2 of B, 4 of C
    places = []
    for lane in range(32):
        group, pair = lane // 4, 2 * (lane % 4)
        for r in range(4):
            low = a[group + 8 * (r & 1), pair + 8 * (r >> 1)]
            high = a[group + 8 * (r & 1), pair + 8 * (r >> 1) + 1]
            held[lane, r] = to_bits(np.array([low, high]), element).view(np.uint32)[0]
        for r in range(2):
            held[lane, 4 + r] = to_bits(b[pair + 8 * r : pair + 8 * r + 2, group], element).view(np.uint32)[0]
        places.append([(group + 8 * (i >> 1), pair + (i & 1)) for i in range(4)])
        held[lane, 6:] = np.array([c[place] for place in places[-1]], np.float32).view(np.uint32)
    body = f"""
    mul.wide.u32 %d0, %t, 40; add.s64 %d0, %x, %d0; mul.wide.u32 %d1, %t, 16; add.s64 %d1, %out, %d1;
    {"".join(f"ld.global.b32 %r{10 + i}, [%d0+{4 * i}];" for i in range(10))}
    mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32
        {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
    {"".join(f"st.global.b32 [%d1+{4 * i}], %r{20 + i};" for i in range(4))}
    """.replace("f32\n", "f32 ")
    got = clean(body, x=held, out=512).values("out", np.float32).reshape(32, 4)
    expected = a @ b + c
    assert (got == [[expected[place] for place in lane] for lane in places]).all()
