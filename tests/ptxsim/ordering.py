"""Order through memory: fences and strong accesses, as in "fence; atomic; fence".

A release is a fence and then a strong write to some address; who reads that address strongly and then fences has
acquired. Atomics that follow on the address keep what was released there (a release sequence), a store replaces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .handlers import mask_of
from .races import Knowledge

if TYPE_CHECKING:
    from .warps import Warp

# What an address carries: knowledge, and the CTA it is for (None: everybody on the GPU).
Carried = tuple[Knowledge, int | None]


class LaneFences:
    """Of a warp: what each lane's last fence could release, and what it has seen and not yet fenced."""

    def __init__(self):
        self.released: dict[int, list[Carried]] = {}  # lane -> what its next strong write carries
        self.seen: dict[int, list[Carried]] = {}


class Ordering:
    """Of one launch."""

    def __init__(self):
        self._carried: dict[int, list[Carried]] = {}  # by address

    def fence(self, warp: Warp, mask: np.ndarray, whole_gpu: bool) -> None:
        scope = None if whole_gpu else warp.cta.index
        for lane in np.flatnonzero(mask):
            self._acquire(warp, int(lane), warp.fences.seen.pop(int(lane), ()))
        for lane in np.flatnonzero(mask):
            one = mask_of(1 << int(lane))
            released = warp.fences.released.setdefault(int(lane), [])
            # A newer fence of the same scope has all that an older one had.
            released[:] = [entry for entry in released if entry[1] != scope]
            released.append((warp.clocks.snapshot(one), scope))
        warp.clocks.tick(mask)

    def strong(
        self,
        warp: Warp,
        lane: int,
        address: int,
        reads: bool,
        writes: bool,
        order: str,
        whole_gpu: bool,
    ) -> None:
        """A lane's strong access. order: "relaxed", "acquire", "release" or "acq_rel"."""
        carried = self._carried.get(address)
        if reads and carried:
            if order in ("acquire", "acq_rel"):
                self._acquire(warp, lane, carried)
            else:
                warp.fences.seen.setdefault(lane, []).extend(carried)
        if not writes:
            return
        mine = list(warp.fences.released.get(lane, ()))
        if order in ("release", "acq_rel"):
            mine.append((warp.clocks.release(mask_of(1 << lane)), None if whole_gpu else warp.cta.index))
        if reads:
            if mine:
                self._carried[address] = [*(carried or ()), *mine]
        elif mine:
            self._carried[address] = mine
        else:
            self._carried.pop(address, None)

    def involves(self, warp: Warp, order: str) -> bool:
        """False when a strong access of this warp can neither release nor acquire anything."""
        return bool(self._carried) or bool(warp.fences.released) or order != "relaxed"

    def _acquire(self, warp: Warp, lane: int, carried) -> None:
        for knowledge, cta in carried:
            if cta is None or cta == warp.cta.index:
                warp.clocks.acquire(knowledge, mask_of(1 << lane))


def order_of(modifiers: tuple[str, ...]) -> tuple[str, bool]:
    """(order, whether it reaches the whole GPU) of an ld, st, atom or red."""
    order = next((m for m in modifiers if m in ("acquire", "release", "acq_rel", "relaxed")), "relaxed")
    return order, "cta" not in modifiers
