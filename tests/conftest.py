"""What holds for all tests."""

import os
import signal
from collections.abc import Iterator

import pytest

# Threads that wait for the others sleep. Spinning, as OpenMP does by default, makes a run of thousands of small calls
# several times longer where other programs use the cores too. Read when torch is imported, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A script's background job (`./run tests &`) starts with SIGINT ignored, one of nohup with SIGHUP, and programs that
# tests start and interrupt would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="module", params=["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def every_architecture(request: pytest.FixtureRequest) -> Iterator[str]:
    """Simulated devices of the module are such GPUs: Hopper, and the smallest one before it."""
    from ptxsim.device import SimulatedDevice

    usual, SimulatedDevice.architecture = SimulatedDevice.architecture, request.param
    yield request.param
    SimulatedDevice.architecture = usual
