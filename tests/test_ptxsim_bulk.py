"""Rules of asynchronous copies and their groups, and the register rules of wgmma: state machines without warps."""

import pytest
from ptxsim.bulk import MAX_BYTES, Groups, problems_of_async_copy, problems_of_bulk_copy
from ptxsim.wgmma_registers import Multiplication, WgmmaRegisters


@pytest.mark.parametrize(
    "operands, problem",
    [
        ((1024, 4096, 64), None),
        ((1024, 4096, 0), None),
        ((1032, 4096, 64), "destination 0x408"),
        ((1024, 4097, 64), "source 0x1001"),
        ((1024, 4096, 40), "size 0x28"),
        ((1024, 4096, MAX_BYTES + 1), "at most"),
    ],
)
def test_operands_of_bulk_copies(operands, problem):
    found = problems_of_bulk_copy(*operands)
    assert (not found) if problem is None else len(found) == 1 and problem in found[0]


@pytest.mark.parametrize(
    "operands, problem",
    [
        ((16, 32, 16, 16), None),
        ((4, 8, 4, 0), None),
        ((4, 8, 8, 8), "destination"),
        ((8, 4, 8, 8), "source 0x4"),
        ((16, 16, 12, 12), "size 12"),
        ((16, 16, 4, 8), "source size 8"),
    ],
)
def test_operands_of_async_copies(operands, problem):
    found = problems_of_async_copy(*operands)
    assert (not found) if problem is None else any(problem in text for text in found)


def test_groups_retire_in_order_and_empty_ones_count():
    groups: Groups[str] = Groups()
    groups.add("a")
    groups.commit()
    groups.commit()
    groups.add("b")
    groups.add("c")
    groups.commit()
    groups.add("open")
    assert groups.older_than(2) == ["a"] and groups.older_than(3) == [] and groups.older_than(9) == []
    assert groups.retire(1) == ["a"] and groups.retire(1) == []
    assert groups.outstanding() == ["b", "c", "open"]
    assert groups.retire(0) == ["b", "c"] and groups.outstanding() == ["open"]


D, A, OTHER = (1, 2, 3, 4), (10, 11, 12, 13), (5, 6, 7, 8)
UNTOUCHED = bytes(16)


def mma(accumulators=D, operands=(), shape="m64n8k16", name="mma"):
    return Multiplication(accumulators, operands, shape, name)


def touched(*slots: int) -> bytes:
    return bytes(slot in slots for slot in range(16))


def fenced() -> WgmmaRegisters:
    registers = WgmmaRegisters()
    registers.fence()
    return registers


def owners(registers: WgmmaRegisters, slots) -> list:
    return [owner and owner.instruction for owner in map(registers.owner, slots)]


def test_the_first_needs_a_fence():
    assert "no wgmma.fence" in WgmmaRegisters().multiply(mma(), UNTOUCHED)[0]
    assert fenced().multiply(mma(), UNTOUCHED) is None


@pytest.mark.parametrize("slot", [D[0], A[3]])
def test_touched_registers_need_a_fence(slot):
    assert "since the last wgmma.fence" in fenced().multiply(mma(operands=A), touched(slot))[0]


def test_others_than_its_registers_may_be_touched():
    assert fenced().multiply(mma(), touched(*OTHER, *A)) is None


def test_registers_are_owned_until_the_wait_that_covers_them():
    registers = fenced()
    registers.multiply(mma(operands=A, name="first"), UNTOUCHED)
    assert owners(registers, D + A + OTHER) == ["first"] * 8 + [None] * 4
    registers.commit()
    assert registers.wait(1) == [] and registers.owner(D[0])
    assert [m.instruction for m in registers.wait(0)] == ["first"] and owners(registers, D + A) == [None] * 8


def test_an_uncommitted_one_is_not_covered_by_any_wait():
    registers = fenced()
    registers.multiply(mma(), UNTOUCHED)
    assert registers.wait(0) == [] and registers.owner(D[0])


def test_retiring_an_older_group_leaves_what_a_newer_one_owns():
    registers = fenced()
    registers.multiply(mma(operands=A, name="old"), UNTOUCHED)
    registers.commit()
    assert registers.multiply(mma(name="new"), UNTOUCHED) is None  # chained: no fence, no wait
    registers.commit()
    registers.wait(1)
    assert owners(registers, A + D) == [None] * 4 + ["new"] * 4
    registers.wait(0)
    assert owners(registers, D) == [None] * 4


@pytest.mark.parametrize(
    "second, problem",
    [
        (mma(shape="m64n16k16"), "same shape"),
        (mma((*D[1:], 9)), "same shape"),
        (mma(OTHER, D), "accumulator of a wgmma in flight"),
        (mma(A), "same shape"),
        (mma(OTHER, A), None),
        (mma(), None),
    ],
)
def test_registers_shared_by_two_in_flight(second, problem):
    registers = fenced()
    registers.multiply(mma(operands=A, name="first"), UNTOUCHED)
    found = registers.multiply(second, UNTOUCHED)
    if problem is None:
        assert found is None
    else:
        assert problem in found[0] and found[1] == "first"
