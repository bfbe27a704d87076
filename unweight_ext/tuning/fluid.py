"""When the CTAs of a product have all their weights. They share the memory's rate, and none takes more than it can: so
who has more to do than others gets what they leave. Pure arithmetic on bytes and clocks.

A CTA asks for bytes ahead of its work: for the first of them perhaps long before it starts, then for as many as its
ring takes; and when it has copied all, for the first of the product behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

EPSILON = 1e-6


@dataclass(frozen=True)
class Load:
    """What some CTAs have to do in one launch, all the same."""

    ctas: int
    weight_bytes: float
    own: float  # clocks, if no byte kept it waiting
    last: float  # clocks that it works on after its last bytes came
    asked: float = 0.0  # bytes that it asks for first, perhaps long before
    ahead: float = inf  # bytes that it asks for ahead of those that it has worked on

    @property
    def bytes_a_clock(self) -> float:
        """Of its own work."""
        return self.weight_bytes / self.own


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
    arrived: float  # of its own bytes
    worked: float = 0.0
    done: float = inf  # when all its bytes were there
    finished: float = inf
    next_from: float = inf  # when bytes of the next launch begin to come
    next_arrived: float = 0.0

    @property
    def most(self) -> float:
        """Bytes that it has asked for by now."""
        return min(self.load.weight_bytes, max(self.load.asked, self.worked + self.load.ahead))

    def asks(self, now: float, arrives: float, works: bool) -> float:
        """So many bytes a clock at most."""
        if self.done == inf:
            if now < arrives - EPSILON:
                return 0.0
            if self.arrived < self.most - EPSILON:
                return inf
            # As fast as it works, once it has asked for what it does first.
            return (
                self.load.bytes_a_clock if works and self.worked + self.load.ahead > self.load.asked - EPSILON else 0.0
            )
        return inf if now >= self.next_from - EPSILON and self.next_arrived < self.load.asked - EPSILON else 0.0

    def works(self, rate: float) -> float:
        """Bytes a clock, when it gets so many."""
        if self.worked >= self.load.weight_bytes - EPSILON:
            return 0.0
        most = self.load.bytes_a_clock
        return most if self.arrived > self.worked + EPSILON else min(most, rate if self.done == inf else 0.0)

    def until_change(self, now: float, rate: float, work: float) -> float:
        """Clocks."""
        changes = [inf]

        def at(left: float, speed: float) -> None:
            if left > EPSILON and speed > EPSILON:
                changes.append(left / speed)

        if self.done == inf:
            moves = work if self.most == self.worked + self.load.ahead else 0.0
            at(self.most - self.arrived, rate - moves)
            at(self.load.weight_bytes - self.arrived, rate)
            at(self.load.asked - self.load.ahead - self.worked, work)
            at(self.arrived - self.worked, work - rate)
        else:
            at(self.load.asked - self.next_arrived, rate)
            at(self.next_from - now, 1.0)
        at(self.load.weight_bytes - self.load.ahead - self.worked, work)
        at(self.load.weight_bytes - self.worked, work)
        return min(changes)


def loop_end(loads: Sequence[Load], memory: Memory, around: Around | None, launches: int = 6) -> float:
    """Clocks from the first copies to the last CTA's last sum. `around` None: of a loop alone, which starts at 0."""
    if around is None:
        loads = [replace(load, asked=0.0, ahead=inf) for load in loads]
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
    ctas = [_Cta(load, there) for load, there in zip(loads, ahead, strict=True)]
    now, end, until = 0.0, 0.0, inf
    while True:
        for cta in ctas:
            if cta.done == inf and cta.arrived >= cta.load.weight_bytes - EPSILON:
                cta.done = now
            copied = cta.worked + cta.load.ahead >= cta.load.weight_bytes - EPSILON
            if copied and cta.next_from == inf and around.hints is not None:
                cta.next_from = now + around.hints
            if cta.finished == inf and cta.done < inf and cta.worked >= cta.load.weight_bytes - EPSILON:
                cta.finished = max(now, cta.done + cta.load.last)
                end = max(end, cta.finished)
        if until == inf and all(cta.finished < inf for cta in ctas):
            until = end + around.behind
            if around.asks is not None and around.hints is None:
                for cta in ctas:
                    cta.next_from = end + around.asks + memory.latency
        if until <= now + EPSILON:
            break
        works = now >= around.consumers - EPSILON
        rates = _shared([(cta.load.ctas, cta.asks(now, arrives, works)) for cta in ctas], memory.rate)
        work = [cta.works(rate) if works else 0.0 for cta, rate in zip(ctas, rates, strict=True)]
        step = min(cta.until_change(now, rate, w) for cta, rate, w in zip(ctas, rates, work, strict=True))
        step = min(step, *(event - now for event in (arrives, around.consumers, until) if event > now + EPSILON), inf)
        for cta, rate, w in zip(ctas, rates, work, strict=True):
            cta.worked += w * step
            if cta.done == inf:
                cta.arrived += rate * step
            else:
                cta.next_arrived += rate * step
        now += step
    if around.hints is None and around.asks is None:
        return end, [0.0] * len(ctas), around.arrival
    waiting = [cta.next_from for cta in ctas if cta.next_arrived < cta.load.asked - EPSILON]
    return end, [cta.next_arrived for cta in ctas], max(0.0, min(waiting, default=until) - until)


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
