"""Programmatic dependent launch: what a kernel does that may start before the one launched before it is complete.

Until griddepcontrol.wait the earlier launch may still write, and read, any global memory. So a thread may touch none
before it has executed the wait, or is ordered after a thread that has (a barrier, an mbarrier). What it asks others to
do, bulk copies and cp.async, counts as its own.

Free before the wait: the kernel's parameters, constants, prefetches (also bulk ones), and strong loads (ld.volatile,
ld.relaxed, ld.acquire). These may give what was there before or after, so they are for finding out what to prefetch
and must be bounded whatever they give; they are read anew after the wait. Not free are ordinary loads, and all the
more those through the non-coherent cache, which would keep an old value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .checks import Kind
from .races import Clocks, async_stamp

if TYPE_CHECKING:
    from .memory import AsyncAccess
    from .warps import Warp


class EarlierLaunch:
    """An agent of the clocks: who has waited for it knows it, and hands that on as all it knows."""

    def __init__(self, clocks: Clocks):
        self._clocks = clocks
        self._agent = clocks.async_agent()
        self._waited: set[Warp] = set()  # all lanes know
        self.awaited = False  # by anybody

    def wait(self, warp: Warp, mask: np.ndarray) -> None:
        self.awaited = True
        warp.clocks.acquire(self._clocks.completion(self._agent), mask)

    def check(self, warp: Warp, lanes: np.ndarray, does: str) -> None:
        """Reports lanes that don't know that it is complete."""
        if warp in self._waited:
            return
        limits = warp.clocks.limits(lanes, np.full(len(lanes), self._agent))
        late = limits < async_stamp(self._agent)
        if late.any():
            warp.report(Kind.DEPENDENT, f"{does} before griddepcontrol.wait", lanes[late])
        elif warp.clocks.uniform:
            self._waited.add(warp)

    def check_async(self, access: AsyncAccess, does: str) -> None:
        """The same for an asynchronous operation, which knows what its thread knew."""
        access.knowledge.widen(self._agent + 1)
        if access.knowledge.seen[self._agent] < async_stamp(self._agent):
            access.report(Kind.DEPENDENT, f"{does}, started before griddepcontrol.wait")
