"""A kernel of the shape that products with packed weights have, right and with one bug each."""

import numpy as np
import pytest
from ptxsim import Kind, Machine, fragments
from test_ptxsim_seeded import bfloat16, check_reported, marked_lines, module, tiles

STAGES = 6
COLUMNS = 64 * STAGES
SLOTS = 2 * 11 * 1024
BUGS = {
    "lanes_still_read": (Kind.RACE, "fill"),
    "wait_too_short": (Kind.WGMMA, "fill"),
    "one_buffer": (Kind.WGMMA, "fill"),
    "slot_in_flight": (Kind.RACE, "multiply"),
    "fence_too_early": (Kind.WGMMA, "multiply"),
    "no_last_wait": (Kind.WGMMA, "output"),
    "slot_forgotten": (Kind.DEADLOCK, "produce"),
    "one_warp_does_not_wait": (Kind.RACE, "fill"),
}


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def registers_of(a: np.ndarray) -> np.ndarray:
    """BF16 [64, columns] as the kernel reads it: [k-step, thread, register, half]."""
    row, column = fragments.operand_a()  # [register, half, lane]
    result = np.empty((a.shape[1] // 16, 128, 4, 2), np.uint16)
    for kstep, threads in enumerate(result):
        for warp in range(4):
            threads[32 * warp :][:32] = a[16 * warp + row, 16 * kstep + column].transpose(2, 0, 1)
    return ~result


def run(name: str, seed: int):
    rng = np.random.default_rng(3)
    a, b = (bfloat16(rng.standard_normal((rows, COLUMNS))) for rows in (64, 16))
    machine = Machine(seed=seed, step_budget=40_000)
    weights = machine.allocate(registers_of(a), "weights", readonly=True)
    tokens = machine.allocate(tiles(b), "tokens", readonly=True)
    output = machine.allocate(np.zeros((128, 8), np.float32), "output")
    addresses = np.array([weights.base, output.base, tokens.base], np.uint64).tobytes()
    arguments = addresses + np.array([STAGES, 0], np.uint32).tobytes()
    reports = machine.launch(module("fused").kernels[f"fused_{name}"], 1, 256, SLOTS + 32, arguments, check=False)
    row, column = fragments.accumulator(16)  # [register, lane]
    values = output.data[: 4 * 128 * 8].view(np.float32).reshape(4, 32, 8)
    got = np.empty((64, 16))
    for warp in range(4):
        got[16 * warp + row, column] = values[warp].T
    return reports, got, to_float(a) @ to_float(b).T


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_the_clean_one_is_silent_and_right(seed):
    reports, got, exact = run("clean", seed)
    assert not reports, "\n".join(map(str, reports))
    assert np.abs(got - exact).max() <= 2.0**-16 * np.abs(exact).max()


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_reported(name):
    kind, place = BUGS[name]
    for seed in range(3):
        reports, _, _ = run(name, seed)
        check_reported(reports, kind, marked_lines("fused", place))
