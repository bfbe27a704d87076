"""A product with 256 tokens that threads copy, right and with one bug each: setmaxnreg, cp.async with zeros, the proxy
fence after it, wgmma with 128 accumulators a thread, named barriers of some warps."""

import numpy as np
import pytest
from ptxsim import Kind, Machine, fragments
from test_ptxsim_fused import to_float
from test_ptxsim_seeded import bfloat16, check_reported, marked_lines, module

TOKENS, COUNT, COLUMNS = 256, 203, 64
BUGS = {
    "no_proxy_fence": (Kind.PROXY, "multiply"),
    "no_wait": (Kind.RACE, "multiply"),
    "no_meeting": ((Kind.RACE, Kind.PROXY), "multiply"),
    "no_turns": (Kind.RACE, "exchange"),
}


def registers_of(a: np.ndarray) -> np.ndarray:
    """BF16 [64, columns] as the kernel reads it: [thread of a warpgroup, k-step, register, half]."""
    row, column = fragments.operand_a()  # [register, half, lane]
    result = np.empty((128, a.shape[1] // 16, 4, 2), np.uint16)
    for warp in range(4):
        for kstep in range(result.shape[1]):
            result[32 * warp :][:32, kstep] = a[16 * warp + row, 16 * kstep + column].transpose(2, 0, 1)
    return result


def run(name: str, seed: int):
    rng = np.random.default_rng(5)
    a, x = bfloat16(rng.standard_normal((128, COLUMNS))), bfloat16(rng.standard_normal((COUNT, COLUMNS)))
    machine = Machine(seed=seed, step_budget=40_000)
    tokens = machine.allocate(x, "tokens", readonly=True)  # nothing lies behind the last one
    weights = machine.allocate(np.stack([registers_of(a[:64]), registers_of(a[64:])]), "weights", readonly=True)
    output = machine.allocate(np.zeros(256, np.float32), "output")
    addresses = np.array([tokens.base, output.base, weights.base], np.uint64).tobytes()
    arguments = addresses + np.array([COUNT, 0], np.uint32).tobytes()
    kernel = module("tokens").kernels[f"tokens_{name}"]
    reports = machine.launch(kernel, 1, 384, TOKENS * 2 * COLUMNS, arguments, check=False)
    # A thread has two rows, and of each the columns 2 (lane % 4) and 2 (lane % 4) + 1 of every 8.
    product = np.zeros((128, TOKENS))
    product[:, :COUNT] = to_float(a) @ to_float(x).T
    thread = np.arange(256)
    row = 64 * (thread // 128) + 16 * (thread % 128 // 32) + thread % 32 // 4
    sums = product.reshape(128, TOKENS // 8, 4, 2).sum(axis=(1, 3))
    expected = sums[row, thread % 4] + sums[row + 8, thread % 4]
    return reports, output.data[: 4 * 256].view(np.float32), expected[thread ^ 64]


@pytest.mark.parametrize("seed", range(2))
def test_the_clean_one_is_silent_and_right(seed):
    reports, got, exact = run("clean", seed)
    assert not reports, "\n".join(map(str, reports))
    assert np.abs(got - exact).max() <= 2.0**-14 * np.abs(exact).max()


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_reported(name):
    kind, place = BUGS[name]
    reports, _, _ = run(name, seed=1)
    check_reported(reports, kind, marked_lines("tokens", place))
