"""wgmma.*: the four warps of a warpgroup start a product together, and the scheduler lets it happen later.

Each product is an agent. It reads shared memory through the async proxy, knows of it only what all four warps know, and
products of a warpgroup happen in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from . import fragments, wgmma
from .alu_round import decode
from .alu_types import Modifiers, UnsupportedInstruction
from .checks import Kind
from .handlers import BLOCKED, DONE, handles
from .memory import AsyncAccess
from .program import Immediate, Instruction, Vector
from .races import Knowledge
from .warpgroups import WARPS, Warpgroup, warpgroup_of
from .wgmma_registers import Multiplication


@dataclass(frozen=True)
class _Form:
    """What an instruction multiplies."""

    n: int
    element: str
    shape: str  # of the accumulators
    scale: int  # of the products: 1 or -1
    a_mn_major: bool
    b_mn_major: bool


@dataclass(eq=False)
class _Share:
    """What one warp brings to a product."""

    warp: object
    knowledge: Knowledge
    accumulators: tuple[int, ...]
    descriptors: tuple[int, ...]  # of A, unless it comes from registers, and of B
    a: np.ndarray | None  # uint16[4, 2, 32]
    adds: bool  # to the accumulators


@dataclass(eq=False)
class _Product:
    instruction: Instruction
    form: _Form
    shares: dict[int, _Share] = field(default_factory=dict)  # by warp of the group
    agent: int = 0
    access: AsyncAccess | None = None
    done: bool = False
    awaited: bool = False


def _form(instruction: Instruction, flags: list[int], a_in_registers: bool) -> _Form:
    mods = Modifiers("wgmma", instruction.modifiers)
    for part in ("mma_async", "sync", "aligned"):
        mods.choice(part)
    element = mods.type("bf16", "f16")
    mods.type(element)
    mods.type("f32")
    shape = next((part for part in instruction.modifiers if re.fullmatch(r"m64n\d+k16", part)), None)
    n = int(re.fullmatch(r"m64n(\d+)k16", shape)[1]) if shape else 0
    if n % 8 or not 8 <= n <= 256:
        raise mods.error("the shape isn't m64nNk16 with N a multiple of 8 up to 256")
    mods.choice(shape)
    mods.done()
    scale_a, scale_b, *transposed = flags
    if abs(scale_a) != 1 or abs(scale_b) != 1:
        raise mods.error("scales of A and B are 1 or -1")
    a_transposed = 0 if a_in_registers or not transposed else transposed[0]
    return _Form(n, element, shape, scale_a * scale_b, bool(a_transposed), bool(transposed and transposed[-1]))


@handles("wgmma.mma_async")
def compile_mma_async(instruction: Instruction):
    d, a, b, scale_d, *flags = instruction.operands
    a_in_registers = isinstance(a, Vector)
    if not all(isinstance(flag, Immediate) for flag in flags):
        raise UnsupportedInstruction("wgmma", instruction.modifiers, "flags that are no immediates")
    form = _form(instruction, [flag.value for flag in flags], a_in_registers)
    accumulators = tuple(item.slot for item in d.items)
    if len(accumulators) != form.n // 2:
        raise UnsupportedInstruction("wgmma", instruction.modifiers, f"{len(accumulators)} accumulators")
    operands = tuple(item.slot for item in a.items) if a_in_registers else ()

    def step(warp, mask):
        group = warpgroup_of(warp)
        if group is None:
            return DONE
        adds = _uniform(warp, scale_d, "scale-d") != 0
        named = (b,) if a_in_registers else (a, b)
        descriptors = tuple(_uniform(warp, operand, "a descriptor") for operand in named)
        halves = fragments.halves(np.stack([warp.rows[slot] for slot in operands])) if operands else None
        share = _Share(warp, warp.clocks.release(), accumulators, descriptors, halves, adds)
        product = _join(group, warp, share, instruction, form)
        multiplication = Multiplication(accumulators, operands, form.shape, instruction, product)
        problem = group.registers[warp.index % WARPS].multiply(multiplication, warp.accessed)
        if problem:
            warp.report(Kind.WGMMA, problem[0], other=problem[1].index if problem[1] else -1)
        for slot in multiplication.slots:
            written = slot in accumulators
            warp.hold(slot, multiplication, written, adds or not written)
        return DONE

    return step


def _uniform(warp, operand, what: str) -> int:
    row = warp.read(operand)
    if (row != row[0]).any():
        warp.report(Kind.WGMMA, f"{what} differs between the lanes of the warp")
    return int(row[0])


def _join(group: Warpgroup, warp, share: _Share, instruction: Instruction, form: _Form) -> _Product:
    """The product that this warp's next mma_async belongs to; it starts when all four warps are there."""
    member = warp.index % WARPS
    position = group.started[member]
    group.started[member] += 1
    if position == len(group.products):
        product = _Product(instruction, form)
        group.products.append(product)
        warp.cta.at_exit.append(lambda: _check_at_exit(warp, product))
    product = group.products[position]
    if product.instruction is not instruction:
        detail = "the warps of the warpgroup execute different wgmma instructions"
        warp.report(Kind.WGMMA, detail, other=product.instruction.index)
    product.shares[member] = share
    if len(product.shares) == WARPS:
        _start(group, warp, product)
    return product


def _check_at_exit(warp, product: _Product) -> None:
    if len(product.shares) < WARPS and not product.done:
        _report_missing(warp, product)
    elif not product.awaited:
        detail = "the CTA exits without a wgmma.wait_group that covers it"
        warp.report(Kind.PENDING_AT_EXIT, detail, instruction=product.instruction)


def _report_missing(warp, product: _Product) -> None:
    missing = ", ".join(str(i) for i in range(WARPS) if i not in product.shares)
    detail = f"warps {missing} of the warpgroup never execute it"
    warp.report(Kind.WGMMA, detail, instruction=product.instruction)


def _start(group: Warpgroup, warp, product: _Product) -> None:
    shares = [product.shares[i] for i in range(WARPS)]
    for share in shares[1:]:
        if share.descriptors != shares[0].descriptors:
            warp.report(Kind.WGMMA, "a descriptor differs between the warps of the warpgroup")
        if share.adds != shares[0].adds:
            warp.report(Kind.WGMMA, "scale-d differs between the warps of the warpgroup")
    product.agent = warp.machine.clocks.async_agent()
    product.access = AsyncAccess(warp, product.agent, _known_to_all([share.knowledge for share in shares]))

    def complete() -> None:
        # In order: who comes later may take up what an earlier one leaves in the accumulators.
        for earlier in group.products:
            if not earlier.done:
                _multiply(earlier)
            if earlier is product:
                break

    warp.cta.post(warp, complete, "a wgmma")


def _known_to_all(parts: list[Knowledge]) -> Knowledge:
    size = max(len(part.seen) for part in parts)
    for part in parts:
        part.widen(size)
    size = min(len(part.seen) for part in parts)
    seen = np.minimum.reduce([part.seen[:size] for part in parts])
    return Knowledge(seen, np.minimum.reduce([part.fenced[:size] for part in parts]))


def _multiply(product: _Product) -> None:
    product.done = True
    form = product.form
    shares = [product.shares[i] for i in range(WARPS)]
    read = decode(form.element)
    descriptors = shares[0].descriptors
    if shares[0].a is not None:
        a = np.zeros((64, wgmma.K))
        row, column = fragments.operand_a()
        for i, share in enumerate(shares):
            a[16 * i + row, column] = read(share.a.astype(np.uint64).reshape(-1)).reshape(share.a.shape)
    else:
        a = _matrix(product, descriptors[0], 64, form.a_mn_major, read)
    b = _matrix(product, descriptors[-1], form.n, form.b_mn_major, read)
    if a is None or b is None:
        return  # reported; the accumulators stay
    row, column = fragments.accumulator(form.n)
    c = np.zeros((64, form.n))
    to_number = decode("f32")
    for i, share in enumerate(shares):
        if share.adds:
            c[16 * i + row, column] = to_number(np.stack([share.warp.rows[slot] for slot in share.accumulators]))
    result = wgmma.multiply(form.scale * a, b, c, -126 if form.element == "bf16" else -14)
    bits = result.view(np.uint32).astype(np.uint64)
    for i, share in enumerate(shares):
        for slot, values in zip(share.accumulators, bits[16 * i + row, column], strict=True):
            share.warp.rows[slot] = values


def _matrix(product: _Product, bits: int, rows: int, mn_major: bool, read) -> np.ndarray | None:
    access = product.access
    try:
        descriptor = wgmma.decode_descriptor(bits)
    except wgmma.DescriptorError as error:
        access.report(Kind.WGMMA, str(error))
        return None
    addresses = wgmma.element_addresses(descriptor, rows, mn_major)
    shared = access.warp.cta.shared
    if not shared.async_read_granules(access, np.unique(addresses >> 4), access.warp.index // WARPS):
        return None
    return read(shared.data.view(np.uint16)[addresses >> 1].astype(np.uint64).reshape(-1)).reshape(addresses.shape)


@handles("wgmma.fence")
def compile_fence(instruction: Instruction):
    def step(warp, mask):
        group = warpgroup_of(warp)
        if group is not None:
            group.registers[warp.index % WARPS].fence()
            warp.accessed[:] = bytes(len(warp.accessed))
        return DONE

    return step


@handles("wgmma.commit_group")
def compile_commit(instruction: Instruction):
    def step(warp, mask):
        group = warpgroup_of(warp)
        if group is not None:
            group.registers[warp.index % WARPS].commit()
        return DONE

    return step


@handles("wgmma.wait_group")
def compile_wait(instruction: Instruction):
    (newest,) = instruction.operands

    def step(warp, mask):
        group = warpgroup_of(warp)
        if group is None:
            return DONE
        registers = group.registers[warp.index % WARPS]
        covered = registers.groups.older_than(newest.value)
        for multiplication in covered:
            product = multiplication.product
            if product.done:
                continue
            if not _never_comes(group, product):
                return BLOCKED
            product.done = True
            _report_missing(warp, product)
        for multiplication in registers.wait(newest.value):
            multiplication.product.awaited = True
            for slot in multiplication.slots:
                warp.release(slot, multiplication)
            if multiplication.product.agent:
                warp.clocks.acquire(warp.machine.clocks.completion(multiplication.product.agent))
        return DONE

    return step


def _never_comes(group: Warpgroup, product: _Product) -> bool:
    return len(product.shares) < WARPS and all(
        warp.done for i, warp in enumerate(group.warps) if i not in product.shares
    )
