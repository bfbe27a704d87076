"""How the memory's rate is shared: unweight_ext/tuning/fluid.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unweight_ext.tuning.fluid import Around, Load, Memory, loop_end

LOADS = st.lists(
    st.builds(Load, st.integers(1, 50), st.floats(1e3, 1e6), st.floats(1e2, 1e6), st.floats(0, 100)),
    min_size=1,
    max_size=5,
)
# 132 CTAs of 10 000 bytes, which take 1000 clocks of the memory and 500 of their own.
# They ask for 4000 of them at first, and always for the next 3000.
EQUAL = [Load(132, 1e4, 500.0, 10.0, asked=4e3, ahead=3e3)]
MEMORY = Memory(1320.0, 100.0)
AROUND = Around(arrival=100.0, consumers=50.0, behind=150.0, asks=None, hints=None)


def hundred_and_two_hundred(own: float) -> float:
    return loop_end([Load(1, 100.0, 1.0, 0.0), Load(1, 200.0, own, 0.0)], Memory(10.0, 0.0), None)


def test_who_has_more_gets_what_the_others_leave() -> None:
    # Five bytes a clock each up to clock 20, then all ten for the one that has 100 left.
    assert hundred_and_two_hundred(own=1.0) == pytest.approx(30)


def test_nobody_takes_more_than_it_can() -> None:
    assert hundred_and_two_hundred(own=40.0) == pytest.approx(40)
    # Up to clock 20 half of the rate was less than it could take; 6.25 a clock from there on.
    assert hundred_and_two_hundred(own=32.0) == pytest.approx(20 + 100 / 6.25)


@given(LOADS)
def test_neither_the_memory_nor_a_cta_is_faster_than_it_is(loads: list[Load]) -> None:
    end = loop_end(loads, MEMORY, None)
    assert end >= 0.999999 * sum(load.ctas * load.weight_bytes for load in loads) / MEMORY.rate
    assert end >= 0.999999 * max(load.own for load in loads)


def test_the_first_bytes_and_the_last_stage_take_their_time() -> None:
    assert loop_end(EQUAL, MEMORY, AROUND) == pytest.approx(100 + 1000 + 10)


def test_what_was_asked_for_before_is_there() -> None:
    # Asked for 30 clocks behind the last sum, it begins to arrive 20 before the copies: 200 of 10 000 bytes.
    assert loop_end(EQUAL, MEMORY, replace(AROUND, asks=30.0)) == pytest.approx(1000 - 20 + 10)
    # Asked for later, it arrives while copies wait for it.
    assert loop_end(EQUAL, MEMORY, replace(AROUND, asks=80.0)) == pytest.approx(30 + 1000 + 10)


def test_hints_keep_the_memory_at_work() -> None:
    # The ring takes 400 clocks of the memory, what is around the loop 160: a launch is as long as its bytes take.
    assert loop_end(EQUAL, MEMORY, replace(AROUND, hints=200.0)) + AROUND.behind == pytest.approx(1000, rel=0.002)


def test_hints_of_a_small_ring_run_out() -> None:
    # It takes 100 clocks; then the memory waits until the first of its bytes are worked on.
    around, loads = replace(AROUND, hints=100.0), [replace(EQUAL[0], asked=1e3, ahead=750.0)]
    idle = 10 + AROUND.behind - 100 + AROUND.consumers + 500 * 250 / 1e4
    assert loop_end(loads, MEMORY, around) + AROUND.behind == pytest.approx(1000 + idle, rel=0.002)


def test_stages_that_were_hinted_come_as_fast_as_the_memory_gives_them() -> None:
    # Its own work takes twice the memory's time, so that a launch takes that and what is around it: all that was asked
    # for is there before it begins, however slowly it is worked on.
    loads = [replace(EQUAL[0], own=2000.0)]
    assert loop_end(loads, MEMORY, replace(AROUND, hints=200.0)) == pytest.approx(AROUND.consumers + 2000)


def test_hints_wait_for_the_last_copy() -> None:
    # It is made when 7000 bytes, 700 clocks of the memory, have come and are worked on; all wait for what follows.
    end = loop_end(EQUAL, MEMORY, replace(AROUND, hints=1e4))
    assert end + AROUND.behind == pytest.approx(700 + 1e4, rel=1e-4)


@given(LOADS, st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 1e5), st.booleans())
def test_a_launch_is_as_long_as_its_bytes_and_its_slowest_cta(
    loads: list[Load], behind: float, consumers: float, ring: float, hints: bool
) -> None:
    around = Around(MEMORY.latency, consumers, behind, None if hints else behind / 2, 300.0 if hints else None)
    rings = [min(ring, load.weight_bytes) for load in loads]
    loads = [replace(x, asked=r, ahead=1 + r / 2) for x, r in zip(loads, rings, strict=True)]
    end = loop_end(loads, MEMORY, around)
    assert end >= 0.999999 * (consumers + max(load.own for load in loads))
    assert end + behind >= 0.999999 * sum(load.ctas * load.weight_bytes for load in loads) / MEMORY.rate
