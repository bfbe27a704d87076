"""Results that are to be other than what a product wrote: NaN for damaged weights."""

from __future__ import annotations

import numpy as np
import pytest
from native_module import native
from ptxsim.device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("every_architecture")
BEFORE = 0x1234


def result(device: SimulatedDevice, halves: int) -> int:
    return device.tensor(np.full(halves, BEFORE, np.uint16), "y", readonly=False)


@pytest.mark.parametrize("first, halves", [(0, 64), (1, 1), (7, 2), (8, 8), (3, 5), (5, 40), (7, 70001)])
@pytest.mark.parametrize("status", [0, 1, 1 << 63])
def test_poison(status: int, first: int, halves: int) -> None:
    """All of y wherever it starts, nothing beside it, and only if there is damage."""
    device = SimulatedDevice()
    y = result(device, first + halves + 8)
    native.poison(device, device.tensor(np.array([status], np.uint64), "status"), y + 2 * first, 2 * halves)
    got = device.read(y, np.uint16, first + halves + 8)
    assert (got[first : first + halves] == (0x7FFF if status else BEFORE)).all()
    assert (got[:first] == BEFORE).all() and (got[first + halves :] == BEFORE).all()
