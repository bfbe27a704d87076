"""The mbarrier state machine: phases, transaction counts, and what the PTX ISA leaves undefined."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptxsim.mbarrier import MAX_COUNT, Mbarrier, MbarrierError


def test_a_fresh_barrier_passes_parity_one():
    barrier = Mbarrier(1)
    assert barrier.test_parity(1) and not barrier.test_parity(0)


def test_a_phase_completes_with_the_last_arrival_and_starts_anew():
    barrier = Mbarrier(2)
    first = barrier.arrive("a")
    assert not barrier.test_parity(0) and not barrier.test_state(first)
    barrier.arrive("b")
    assert barrier.test_parity(0) and barrier.test_state(first) and barrier.phase == 1
    assert barrier.released == ["a", "b"] and barrier.pending == 2
    barrier.arrive("c")
    assert barrier.released == ["a", "b"] and barrier.test_parity(0)
    barrier.arrive("d")
    assert not barrier.test_parity(0) and barrier.test_parity(1) and barrier.released == ["c", "d"]


@pytest.mark.parametrize("arrival_first", [False, True])
def test_bytes_and_arrivals_are_both_waited_for(arrival_first):
    barrier = Mbarrier(1)
    if arrival_first:
        barrier.expect_tx(96)
        barrier.arrive("producer")
        barrier.complete_tx(64, "copy 1")
        assert not barrier.test_parity(0)
        barrier.complete_tx(32, "copy 2")
    else:  # a copy may be done before its bytes are expected
        barrier.complete_tx(96, "copy")
        assert barrier.tx == -96 and not barrier.test_parity(0)
        barrier.expect_tx(96)
        assert not barrier.test_parity(0)
        barrier.arrive("producer")
    assert barrier.test_parity(0) and "producer" in barrier.released and barrier.tx == 0


def test_wrong_byte_counts_never_complete():
    barrier = Mbarrier(1)
    barrier.expect_tx(100)
    barrier.arrive()
    barrier.complete_tx(96)
    assert not barrier.test_parity(0) and str(barrier) == "phase 0 (parity 0), pending 0 of 1, tx 4"


def test_underflow():
    barrier = Mbarrier(1)
    barrier.expect_tx(16)
    barrier.arrive()
    with pytest.raises(MbarrierError, match="0 pending in phase 0: underflow"):
        barrier.arrive()
    with pytest.raises(MbarrierError, match="arrival of 3 with 2 pending"):
        Mbarrier(2).arrive(count=3)


def test_dropping_lowers_later_phases():
    barrier = Mbarrier(3)
    barrier.drop()
    barrier.arrive(count=2)
    assert barrier.phase == 1 and barrier.pending == 2
    with pytest.raises(MbarrierError, match="3 with 2 expected"):
        barrier.drop(count=3)


def test_no_complete_must_not_be_last():
    barrier = Mbarrier(2)
    barrier.arrive(complete=False)
    with pytest.raises(MbarrierError, match="noComplete"):
        barrier.arrive(complete=False)


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_counts_that_init_takes(count):
    with pytest.raises(MbarrierError, match=f"init with {count}"):
        Mbarrier(count)
    with pytest.raises(MbarrierError, match="tx-count"):
        Mbarrier(1).expect_tx(MAX_COUNT + 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from([16, 32, 64]), max_size=6), st.randoms(use_true_random=False))
def test_any_order_within_a_phase_completes_it_once(count, sizes, random):
    """Bytes may be expected and completed in any order, as long as they are expected before the last arrival."""
    barrier = Mbarrier(count)
    for phase in range(3):
        early = [("arrive", 1)] * (count - 1) + [("expect", size) for size in sizes]
        early += [("complete", size) for size in sizes if random.random() < 0.5]
        late = [("complete", size) for size in sizes]
        for event in early:
            if event[0] == "complete":
                late.remove(event)
        late.append(("arrive", 1))
        random.shuffle(early)
        random.shuffle(late)
        for index, (what, amount) in enumerate(early + late):
            assert barrier.phase == phase, index
            if what == "arrive":
                barrier.arrive()
            elif what == "expect":
                barrier.expect_tx(amount)
            else:
                barrier.complete_tx(amount)
        assert barrier.phase == phase + 1 and barrier.tx == 0 and barrier.pending == count
