"""Warpgroups: four warps that multiply together and share registers out among themselves."""

from __future__ import annotations

from .checks import Kind
from .wgmma_registers import WgmmaRegisters

WARPS = 4


class Warpgroup:
    """Warps 4 i … 4 i + 3 of a CTA."""

    def __init__(self, warps: list):
        self.warps = warps
        self.registers = [WgmmaRegisters() for _ in warps]
        self.products: list = []  # of wgmma.mma_async, in order
        self.started = [0] * len(warps)  # products that each warp has a share in
        self.register_changes: list[list] = [[] for _ in warps]  # setmaxnreg instructions that each warp executed


def warpgroup_of(warp) -> Warpgroup | None:
    """None, after a report, in a CTA without four whole warps there."""
    groups, first = warp.cta.warpgroups, warp.index // WARPS * WARPS
    if first not in groups:
        groups[first] = Warpgroup(warp.cta.warps[first : first + WARPS])
    group = groups[first]
    if len(group.warps) < WARPS:
        warp.report(Kind.WGMMA, f"a warpgroup is {WARPS} warps; here are {len(group.warps)}")
        return None
    return group
