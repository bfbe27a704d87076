"""What CTAs of the fused product ask for before the launch in front of theirs is done."""

from __future__ import annotations

import pytest
from linear_product import Product, Weight, config, packed, tokens

HEAD = 672  # header and code table, to a multiple of 16


def prefetched(product: Product) -> tuple[set[tuple[str, int, int]], set[tuple[str, int, int]]]:
    """(what was asked for, what bulk copies read) as (tensor, offset, bytes)."""
    product.run()
    counters = product.device.machine.counters
    return counters.prefetched, counters.bulk_sources


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
@pytest.mark.parametrize("size", [8, 256])
def test_the_first_stages_are_asked_for(size: int, layout: str) -> None:
    """As many as the ring has slots, for each block that a CTA begins with: all of them are copied later."""
    columns = 700
    weight = Weight(packed("trained", (400, columns), layout), columns)
    asked, copied = prefetched(Product([weight], tokens(2, columns), config(size), multiprocessors=3))
    heads = {one for one in asked if one[1] == 0}
    assert {size for _, _, size in heads} == {HEAD}
    stages = asked - heads
    assert stages <= copied
    # Of 3 CTAs, one of which may begin within a group: 1 to 3 blocks, 2 slots or more.
    assert len(stages) >= 8


def test_all_weights_of_a_launch_have_a_first() -> None:
    # 18 stages each: chunks begin with the 1st, 14th, 28th and 41st.
    weights = [Weight(packed("trained", (130, 700), "huffman"), 700) for _ in range(3)]
    asked, copied = prefetched(Product(weights, tokens(3, 700), config(8), multiprocessors=8))
    assert {name for name, _, _ in asked} == {"packed0", "packed1", "packed2"}
    assert {one for one in asked if one[1]} <= copied


def test_nothing_of_experts_is_asked_for() -> None:
    """Which of them have rows may be what the kernel before is about to say."""
    weight = Weight(packed("trained", (3, 64, 256), "nibble"), 256)
    asked, _ = prefetched(Product([weight], tokens(4, 256), config(8), offsets=[1, 1, 4]))
    assert not asked
