"""The proof that the interpreter works: kernels that are right pass in silence, and each bug put into one is reported,
with its kind and its line. The kernels are in ptxsim/seeded/."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ptxsim import Kind, Machine
from ptxsim.compiler import load_module

SEEDED = Path(__file__).parent / "ptxsim" / "seeded"
CSRC = Path(__file__).parents[1] / "csrc"
SEEDS = (0, 1, 2)
WORDS = 128  # of each of the three arrays, unless a case says otherwise


@dataclass(frozen=True)
class Case:
    kind: Kind | tuple[Kind, ...]  # several: which one comes depends on the order of things
    threads: int = 32
    ctas: int = 1
    shared: int = 0
    words: int = WORDS
    budget: int = 20_000
    initialised_scratch: bool = False
    programmatic: bool = False


TILES = 64 * 128 + 16 * 128
WGMMA = {"threads": 128, "shared": TILES, "words": 64 * 16}

CASES = {
    "memory": {
        "shared_out_of_bounds": Case(Kind.OUT_OF_BOUNDS),
        "global_out_of_bounds": Case(Kind.OUT_OF_BOUNDS, ctas=5),
        "misaligned_global": Case(Kind.MISALIGNED, words=WORDS + 4),
        "misaligned_generic": Case(Kind.MISALIGNED),
        "misaligned_matrix_row": Case(Kind.MISALIGNED),
        "uninitialised_register": Case(Kind.UNINITIALISED_REGISTER),
        "uninitialised_shared": Case(Kind.UNINITIALISED_MEMORY),
        "uninitialised_scratch": Case(Kind.UNINITIALISED_MEMORY),
        "write_to_input": Case(Kind.READ_ONLY),
    },
    "races": {
        "lanes_without_syncwarp": Case(Kind.RACE),
        "warps_without_barrier": Case(Kind.RACE, threads=64),
        "buffer_reused_too_early": Case(Kind.RACE, threads=64),
        "ctas_add_without_atomics": Case(Kind.RACE, ctas=4),
        "last_block_without_fence": Case(Kind.RACE, ctas=4),
        "lanes_write_different_values": Case(Kind.RACE),
    },
    "warps": {
        "shuffle_of_missing_lanes": Case(Kind.MEMBER_MASK),
        "divergent_barrier": Case(Kind.DIVERGENCE, threads=64),
        "barrier_counts_differ": Case(Kind.BARRIER, threads=64),
        "barrier_count_too_large": Case(Kind.BARRIER, threads=64),
        "barrier_of_an_exited_warp": Case(Kind.DEADLOCK, threads=64),
        "diverged_matrix_store": Case(Kind.DIVERGENCE),
        "endless_loop": Case(Kind.STEP_BUDGET, budget=4_000),
        "trap_on_bad_input": Case(Kind.TRAP),
    },
    "copies": {
        "barrier_used_before_init_is_visible": Case((Kind.RACE, Kind.MBARRIER), threads=64),
        "barrier_without_init": Case(Kind.MBARRIER),
        "init_without_inval": Case(Kind.MBARRIER),
        "arrival_underflow": Case(Kind.MBARRIER),
        "bytes_never_come": Case(Kind.DEADLOCK, words=WORDS + 4),
        "barrier_overwritten": Case(Kind.MBARRIER),
        "copy_of_odd_size": Case(Kind.MISALIGNED),
        "copy_past_the_tensor": Case(Kind.OUT_OF_BOUNDS),
        "copy_into_the_barrier": Case(Kind.MBARRIER, words=WORDS + 32),
        "data_read_without_waiting": Case(Kind.RACE, threads=64),
        "wrong_parity": Case((Kind.RACE, Kind.DEADLOCK)),
        "overwritten_without_proxy_fence": Case(Kind.PROXY, threads=64),
        "init_not_fenced": Case(Kind.PROXY),
        "slot_still_being_stored": Case(Kind.RACE, threads=64, words=2 * WORDS),
        "store_without_proxy_fence": Case(Kind.PROXY),
        "store_pending_at_exit": Case(Kind.PENDING_AT_EXIT),
        "load_pending_at_exit": Case(Kind.PENDING_AT_EXIT),
        "store_read_back_too_early": Case(Kind.RACE, initialised_scratch=True),
    },
    "wgmma": {
        "operand_register_touched_in_flight": Case(Kind.WGMMA, **WGMMA),
        "operand_register_not_fenced": Case(Kind.WGMMA, **WGMMA),
        "accumulator_read_between": Case(Kind.WGMMA, **WGMMA),
        "descriptor_differs": Case(Kind.WGMMA, **WGMMA),
        "warps_missing": Case(Kind.WGMMA, **WGMMA),
        "operands_without_proxy_fence": Case(Kind.PROXY, **WGMMA),
        "one_warp_did_not_wait": Case(Kind.RACE, **WGMMA | {"shared": TILES + 8, "words": TILES // 4}),
        "operands_overwritten_in_flight": Case(Kind.RACE, **WGMMA),
        "descriptor_out_of_bounds": Case(Kind.OUT_OF_BOUNDS, **WGMMA),
        "not_committed": Case(Kind.WGMMA, **WGMMA),
        "wait_covers_the_older_group_only": Case(Kind.WGMMA, **WGMMA),
        "setmaxnreg_of_one_warp": Case(Kind.REGISTER_POOL, threads=128),
        "setmaxnreg_beyond_the_pool": Case(Kind.DEADLOCK, threads=384, words=384),
    },
    "dependent": {
        "prefetch_by_an_index": Case(Kind.DEPENDENT, programmatic=True),
        "one_thread_waits": Case(Kind.DEPENDENT, threads=64, programmatic=True),
        "copy_before_the_wait": Case(Kind.DEPENDENT, threads=128, programmatic=True),
        "counted_before_the_wait": Case(Kind.DEPENDENT, programmatic=True),
    },
    "products": {
        "decoded_to_shared": Case(Kind.RACE, threads=128, shared=2 * 64 * 128 + 16 * 128, words=128 * 8),
        "warpgroups_in_turns": Case(Kind.RACE, threads=256, shared=TILES, words=256 * 8),
    },
    "pipelines": {
        "stages_of_thread_copies": Case(Kind.RACE, threads=64, words=1024),
        "thread_copies_through_a_barrier": Case(Kind.RACE, threads=64),
        "thread_copies_stored_without_proxy_fence": Case(Kind.PROXY),
        "sums_of_halves": Case(Kind.MEMBER_MASK, threads=64),
        "exchange_by_tokens": Case(Kind.RACE, threads=64),
        "tile_in_turns": Case(Kind.RACE, threads=64, ctas=4, initialised_scratch=True),
        "barrier_of_the_grid": Case(Kind.RACE, threads=32, ctas=4, initialised_scratch=True),
        "epilogue_of_two_tiles": Case(Kind.RACE, threads=64),
        "copied_back_without_proxy_fence": Case(Kind.PROXY),
        "message_to_another_warp": Case(Kind.RACE, threads=64),
    },
}
EACH = [pytest.param(file, name, id=name) for file, cases in CASES.items() for name in cases]


def module(file: str):
    return load_module(SEEDED / f"{file}.cu", flags=(f"-I{CSRC}",), headers=CSRC)


def marked_lines(file: str, name: str) -> set[tuple[str, int]]:
    lines = (SEEDED / f"{file}.cu").read_text().splitlines()
    return {(f"{file}.cu", i) for i, line in enumerate(lines, 1) if line.endswith(f"// reported: {name}")}


def launch(kernel, case: Case, seed: int):
    machine = Machine(seed=seed, step_budget=case.budget)
    data = np.arange(case.words, dtype=np.uint32) + 1
    given = machine.allocate(data, "input", readonly=True)
    output = machine.allocate(np.zeros(case.words, np.uint32), "output")
    scratch = machine.allocate(data if case.initialised_scratch else 4 * case.words, "scratch")
    addresses = np.array([given.base, output.base, scratch.base], np.uint64).tobytes()
    arguments = addresses + np.array([case.words, 0], np.uint32).tobytes()
    return machine.launch(
        kernel, case.ctas, case.threads, case.shared, arguments, check=False, programmatic=case.programmatic
    )


@pytest.mark.parametrize("file, name", EACH)
def test_clean_kernels_are_silent(file, name):
    for seed in SEEDS:
        reports = launch(module(file).kernels[f"{name}_clean"], CASES[file][name], seed)
        assert not reports, "\n".join(map(str, reports))


@pytest.mark.parametrize("file, name", EACH)
def test_bugs_are_reported_where_they_are(file, name):
    places, kind = marked_lines(file, name), CASES[file][name].kind
    assert places
    for seed in SEEDS:
        check_reported(launch(module(file).kernels[f"{name}_bug"], CASES[file][name], seed), kind, places)


@pytest.mark.slow
@pytest.mark.parametrize("file, name", EACH)
def test_many_seeds(file, name):
    case, places = CASES[file][name], marked_lines(file, name)
    kernels = module(file).kernels
    for seed in range(3, 30):
        reports = launch(kernels[f"{name}_clean"], case, seed)
        assert not reports, "\n".join(map(str, reports))
        check_reported(launch(kernels[f"{name}_bug"], case, seed), case.kind, places)


def check_reported(reports, kind: Kind | tuple[Kind, ...], places: set[tuple[str, int]]) -> None:
    """A deadlock is of several places: the picture names them all. A race is of two: which is later is chance."""
    text = "\n".join(map(str, reports)) or "nothing was reported"
    kinds = kind if isinstance(kind, tuple) else (kind,)
    found = [report for report in reports if report.kind in kinds]
    assert found, text
    named = Kind.DEADLOCK in kinds and any(f"{file}:{line}" in text for file, line in places)
    frames = {frame for report in found for frame in report.instruction.location.frames}
    if Kind.RACE in kinds:
        frames |= {frame for report in found if report.other for frame in report.other.location.frames}
    assert named or frames & places, text


# ----------------------------------------------------------------------------------------------------------------- GEMM

GEMM_BUGS = {
    "gemm_no_empty_wait": Kind.RACE,
    "gemm_wrong_bytes": Kind.DEADLOCK,
    "gemm_no_group_wait": Kind.WGMMA,
    "gemm_no_proxy_fence": Kind.PROXY,
    "gemm_no_wgmma_fence": Kind.WGMMA,
}
TILE_COUNT = 5


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest BF16, as uint16."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def tiles(matrix: np.ndarray) -> np.ndarray:
    """BF16 [rows, 64 · T] as T tiles, K-major with the 128-byte swizzle."""
    rows = len(matrix)
    row, column = np.arange(rows)[:, None], np.arange(64)[None]
    byte = row * 128 + column * 2
    place = (byte ^ ((byte >> 7 & 7) << 4)) >> 1
    result = np.empty((matrix.shape[1] // 64, rows * 64), np.uint16)
    for t, tile in enumerate(result):
        tile[place] = matrix[:, 64 * t : 64 * t + 64]
    return result


def run_gemm(name: str, seed: int):
    rng = np.random.default_rng(7)
    a, b = (bfloat16(rng.standard_normal((rows, 64 * TILE_COUNT))) for rows in (64, 16))
    machine = Machine(seed=seed, step_budget=20_000)
    regions = [
        machine.allocate(tiles(a), "A", readonly=True),
        machine.allocate(np.zeros((64, 16), np.uint16), "D"),
        machine.allocate(tiles(b), "B", readonly=True),
    ]
    arguments = (
        np.array([r.base for r in regions], np.uint64).tobytes() + np.array([TILE_COUNT, 0], np.uint32).tobytes()
    )
    reports = machine.launch(module("gemm").kernels[name], 1, 256, 2 * TILES + 2048 + 32, arguments, check=False)
    to_float = lambda x: (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)  # noqa: E731
    got = regions[1].data[: 64 * 16 * 2].view(np.uint16).reshape(64, 16)
    return reports, to_float(got), to_float(a) @ to_float(b).T


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_a_clean_gemm_is_silent_and_right(seed):
    reports, got, exact = run_gemm("gemm_clean", seed)
    assert not reports, "\n".join(map(str, reports))
    assert np.abs(got - exact).max() <= 2.0**-8 * np.abs(exact).max()


@pytest.mark.parametrize("name", GEMM_BUGS)
def test_bugs_of_a_gemm_are_reported(name):
    for seed in SEEDS:
        reports, got, exact = run_gemm(name, seed)
        check_reported(reports, GEMM_BUGS[name], marked_lines("gemm", name))
        if name in ("gemm_no_proxy_fence", "gemm_no_wgmma_fence"):
            assert np.abs(got - exact).max() <= 2.0**-8 * np.abs(exact).max()  # only a checker sees these
