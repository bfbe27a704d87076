"""What CTAs of the fused product ask for ahead: before the launch in front of theirs is done, and of the next one."""

from __future__ import annotations

import numpy as np
import pytest
from linear_product import Product, Weight, assert_same, config, packed, tokens

HEAD = 768  # header and code table, in lines
LINE = 128
Asked = set[tuple[str, int, int]]  # (tensor, offset, bytes)


def prefetched(product: Product, tensor: str = "packed") -> tuple[Asked, Asked]:
    """(what was asked for, but for heads of matrices; what bulk copies read) of tensors whose name begins so."""
    product.run()
    counters = product.device.machine.counters
    asked = {one for one in counters.prefetched if one[0].startswith(tensor)}
    heads = {one for one in asked if one[2] == LINE}  # stages are longer
    for name in {name for name, _, _ in asked}:
        assert {one[1:] for one in heads if one[0] == name} == {(at, LINE) for at in range(0, HEAD, LINE)}
    return asked - heads, counters.bulk_sources


def stages_of(asked: Asked, copied: Asked) -> Asked:
    """The stages, as they are copied, that make up what was asked for: nothing else."""
    found = set()
    for name, at, size in asked:
        end = at + size
        while at < end:
            (stage,) = (one for one in copied if one[:2] == (name, at))
            found.add(stage)
            at += stage[2]
        assert at == end
    return found


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
@pytest.mark.parametrize("size", [8, 256])
def test_the_first_stages_are_asked_for(size: int, layout: str) -> None:
    """As many as the ring has slots, for each block that a CTA begins with: all of them are copied later."""
    columns = 700
    weight = Weight(packed("trained", (400, columns), layout), columns)
    stages, copied = prefetched(Product([weight], tokens(2, columns), config(size), multiprocessors=3))
    stages = stages_of(stages, copied)
    # Of 3 CTAs, one of which may begin within a group: 1 to 3 blocks, 2 slots or more.
    assert len(stages) >= 8


def test_all_weights_of_a_launch_have_a_first() -> None:
    # 18 stages each: chunks begin with the 1st, 14th, 28th and 41st.
    weights = [Weight(packed("trained", (130, 700), "huffman"), 700) for _ in range(3)]
    stages, copied = prefetched(Product(weights, tokens(3, 700), config(8), multiprocessors=8))
    assert {name for name, _, _ in stages} == {"packed0", "packed1", "packed2"}
    stages = stages_of(stages, copied)


def test_of_experts_only_heads_are_asked_for() -> None:
    """Which of them have rows may be what the kernel before is about to say."""
    weight = Weight(packed("trained", (5, 64, 256), "nibble"), 256)
    product = Product([weight, weight], tokens(4, 256), config(8), offsets=[1, 1, 4, 4, 4], multiprocessors=3)
    product.run()
    expert = weight.packed.nbytes // 5
    heads = {(at, LINE) for matrix in range(5) for at in range(matrix * expert, matrix * expert + HEAD, LINE)}
    assert expert > HEAD
    for name in ("packed0", "packed1"):
        assert {one[1:] for one in product.device.machine.counters.prefetched if one[0] == name} == heads


def hinting(
    after: np.ndarray | None, count: int = 3, multiprocessors: int = 4, offsets: list[int] | None = None
) -> Product:
    """A small product that is told what comes next."""
    shape = (2, 130, 300) if offsets else (130, 300)
    weight = Weight(packed("trained", shape, "nibble"), 300)
    size = next(size for size in (8, 64, 128) if count <= size)
    return Product([weight], tokens(count, 300), config(size), offsets, multiprocessors=multiprocessors, next=after)


@pytest.mark.parametrize("layout", ["raw", "huffman", "nibble"])
@pytest.mark.parametrize("shape", [(400, 700), (64, 4500), (1300, 100)])
def test_the_next_products_first_stages_are_asked_for(shape: tuple[int, int], layout: str) -> None:
    """All that its kernel asks for itself, and as much again behind it, by however few CTAs of the one before."""
    columns = shape[1]
    after = packed("trained", shape, layout)
    hinted, _ = prefetched(hinting(after), "next")
    own, copied = prefetched(Product([Weight(after, columns)], tokens(3, columns), config(8), multiprocessors=4))
    ahead = stages_of({("packed0", *one[1:]) for one in hinted}, copied)
    assert ahead >= stages_of(own, copied)
    assert len(ahead) >= 2
    assert {one[1] for one in hinted} == {one[1] for one in own}  # a range for each block


def test_fewer_ctas_than_the_next_product_has() -> None:
    """One block: one CTA, which asks for the stages of four."""
    after = packed("trained", (400, 700), "huffman")
    weight = Weight(packed("trained", (64, 128), "raw"), 128)
    hinted, _ = prefetched(Product([weight], tokens(3, 128), config(8), multiprocessors=4, next=after), "next")
    own, _ = prefetched(Product([Weight(after, 700)], tokens(3, 700), config(8), multiprocessors=4))
    assert {one[1] for one in hinted} == {one[1] for one in own}


def test_experts_say_what_comes_after_them() -> None:
    hinted, _ = prefetched(hinting(packed("trained", (400, 700), "huffman"), offsets=[1, 3]), "next")
    assert hinted


def test_many_tokens_ask_for_nothing() -> None:
    """Not the memory is what they wait for."""
    hinted, _ = prefetched(hinting(packed("trained", (400, 700), "huffman"), count=65), "next")
    assert not hinted


def test_a_hint_changes_nothing() -> None:
    without, hinted = hinting(None).run(), hinting(packed("trained", (400, 700), "huffman")).run()
    assert_same(hinted[0], without[0])


@pytest.mark.parametrize("seed", range(24))
def test_any_bytes_may_come_next(seed: int) -> None:
    """Nothing outside of them is asked for, and nobody hangs: the interpreter would report it."""
    random = np.random.default_rng(seed)
    after = packed("trained", (130, 300), ("huffman", "nibble", "raw")[seed % 3]).reshape(-1).copy()
    if seed % 4 == 0:
        after = random.integers(0, 256, int(random.integers(0, 2000)) // 16 * 16, np.uint8)
    else:
        places = random.integers(0, 128 if seed % 4 == 1 else len(after), 3)
        after[places] = random.integers(0, 256, 3)
    weight = Weight(packed("trained", (64, 128), "raw"), 128)
    Product([weight], tokens(1, 128), config(8), multiprocessors=4, next=after).check()
