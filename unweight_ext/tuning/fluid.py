"""When the CTAs of a product have all their weights. They share the memory's rate, and none takes more than it can: so
who has more to do than others gets what they leave. Pure arithmetic on bytes and clocks.

A CTA asks for bytes in three portions: its first stages, which may have been asked for before it started; the rest, as
slots of its ring become free; and the first stages of the product behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Load:
    """What some CTAs have to do in one launch, all the same."""

    ctas: int
    weight_bytes: float
    own: float  # clocks, if no byte kept it waiting
    last: float  # clocks that it works on after its last bytes came
    asked: float = 0.0  # bytes that it asks for first, perhaps long before
    worked: float = 0.0  # bytes that it has worked on when it asks for others
    copied: float = 0.0  # bytes that it hasn't worked on yet when it has asked for its last

    @property
    def clocks_a_byte(self) -> float:
        return self.own / self.weight_bytes


@dataclass(frozen=True)
class Memory:
    rate: float  # bytes a clock, for all
    latency: float  # clocks


@dataclass(frozen=True)
class Around:
    """What is around the loops of a launch, in clocks; 0 is when the copies begin."""

    arrival: float  # when the memory's first bytes come
    consumers: float  # when the first stage can be decoded
    behind: float  # from the last CTA's last sum to the 0 of the next launch
    asks: float | None  # the next launch's CTAs for the first stages, after the last sum; None: they don't
    hints: float | None  # from a CTA's last copy until first stages of the next launch arrive; None: it asks for none


@dataclass
class _Cta:
    """Those of a load: where they are."""

    load: Load
    portions: list[tuple[float, float, float]]  # when it may begin, bytes, bytes a clock at most
    done: float = inf  # when the loop's bytes were all there
    ahead: float = 0.0  # bytes of the next launch that came

    def asks(self, now: float) -> float:
        """So many bytes a clock at most."""
        return self.portions[0][2] if self.portions and self.portions[0][0] <= now + 1e-6 else 0.0

    def until_change(self, now: float, rate: float) -> float:
        if not self.portions:
            return inf
        begins, left, _ = self.portions[0]
        return left / rate if rate else begins - now

    def take(self, taken: float) -> None:
        if taken:
            begins, left, most = self.portions[0]
            self.portions[0] = (begins, left - taken, most)
            if self.done < inf:
                self.ahead += taken
        while self.portions and self.portions[0][1] <= 1e-6:
            del self.portions[0]


def loop_end(loads: Sequence[Load], memory: Memory, around: Around | None, launches: int = 6) -> float:
    """Clocks from the first copies to the last CTA's last sum. `around` None: of a loop alone, which starts at 0."""
    if around is None:
        loads = [replace(load, asked=0.0) for load in loads]
        return _run(loads, Memory(memory.rate, 0.0), Around(0.0, 0.0, 0.0, None, None), [0.0] * len(loads), 0.0)[0]
    alone = around.hints is None and around.asks is None
    # The first launch finds nothing asked for. Those that follow are soon alike, or in turn like two: what is early in
    # one is late in the next.
    ahead, arrives, ends = [0.0] * len(loads), around.arrival, []
    for _ in range(1 if alone else launches):
        end, ahead, arrives = _run(loads, memory, around, ahead, arrives)
        ends.append(end)
    least = sum(load.ctas * load.weight_bytes for load in loads) / memory.rate - around.behind
    return max(least, sum(ends[-2:]) / len(ends[-2:]))


def _run(
    loads: Sequence[Load], memory: Memory, around: Around, ahead: Sequence[float], arrives: float
) -> tuple[float, list[float], float]:
    """One launch: its end; what of the next one's first stages has come when its copies begin; when the rest does."""
    ctas = []
    for load, there in zip(loads, ahead, strict=True):
        free = around.consumers + load.worked * load.clocks_a_byte + memory.latency if load.asked else 0.0
        portions = [(arrives, load.asked - there), (free, load.weight_bytes - load.asked)]
        ctas.append(_Cta(load, [(begins, left, 1 / load.clocks_a_byte) for begins, left in portions]))
        ctas[-1].take(0.0)
    now, end, until = 0.0, 0.0, inf
    while now < until:
        for cta in ctas:
            if cta.portions or cta.done < inf:
                continue
            cta.done = now
            finished = max(now + cta.load.last, around.consumers + cta.load.own)
            end = max(end, finished)
            if around.hints is not None:
                copied = finished * (1 - cta.load.copied / cta.load.weight_bytes)
                cta.portions.append((max(now, copied + around.hints), cta.load.asked, inf))
        if until == inf and all(cta.done < inf for cta in ctas):
            until = end + around.behind
            if around.asks is not None and around.hints is None:
                start = max(now, end + around.asks + memory.latency)
                for cta in ctas:
                    cta.portions.append((start, cta.load.asked, inf))
        rates = _shared([(cta.load.ctas, cta.asks(now)) for cta in ctas], memory.rate)
        step = min(until - now, *(cta.until_change(now, rate) for cta, rate in zip(ctas, rates, strict=True)))
        for cta, rate in zip(ctas, rates, strict=True):
            cta.take(rate * step)
        now += step
    if around.hints is None and around.asks is None:
        return end, [0.0] * len(ctas), around.arrival
    waiting = [cta.portions[0][0] for cta in ctas if cta.portions]
    return end, [cta.ahead for cta in ctas], max(0.0, min(waiting, default=until) - until)


def _shared(asking: Sequence[tuple[int, float]], rate: float) -> list[float]:
    """How much each of so many CTAs gets of `rate` when it takes so much at most: as others do, or its most."""
    left, many = rate, sum(ctas for ctas, most in asking if most)
    got = [0.0] * len(asking)
    for i in sorted(range(len(asking)), key=lambda i: asking[i][1]):
        ctas, most = asking[i]
        if most:
            got[i] = min(most, left / many)
            left -= ctas * got[i]
            many -= ctas
    return got
