"""Times calls with nothing of theirs in the L2 cache."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

TIMES_L2 = 3
RUNS, WARM_UP = 21, 3
MOST_KEPT = 64


def copies_for(bytes_read: int, l2_bytes: int) -> int:
    """How many buffers to go through in turn, so that each was followed by more than three caches full of others."""
    if bytes_read <= 0:
        raise ValueError(f"bytes_read: {bytes_read}, expected more than 0")
    return max(2, math.ceil(TIMES_L2 * l2_bytes / bytes_read) + 1)


@dataclass(frozen=True)
class Times:
    """Of one call, in microseconds."""

    median: float
    lowest: float
    highest: float
    kernels: dict[str, float]  # by name, the median time on the GPU of all its launches in a call; empty on a CPU

    @classmethod
    def of(cls, samples: list[float], kernels: dict[str, float] | None = None) -> Times:
        return cls(statistics.median(samples), min(samples), max(samples), kernels or {})


def l2_bytes(device: str) -> int:
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 32 << 20


def results_kept(bytes_written: int, l2_bytes: int) -> int:
    """How many results to keep, so that the allocator gives memory that isn't in the cache. (A few small ones do.)"""
    return min(copies_for(bytes_written, l2_bytes), MOST_KEPT)


def measure(
    call: Callable[[int], object], device: str, runs: int = RUNS, warm_up: int = WARM_UP, keep: int = 1
) -> Times:
    """Times `call(turn)`, turn = 0, 1, …, which takes a cold buffer at each turn. The last `keep` results live on.

    A call's time is between two CUDA events around it, so it has the host's time in it where the GPU waits for the host
    (an operator that reads the status back). The kernels' own times come from the profiler, in a second round.
    """
    kept: deque[object] = deque(maxlen=keep)
    warm_up = max(warm_up, keep + 1)  # the allocator has all it will need
    for turn in range(warm_up):
        kept.append(call(turn))
    if device != "cuda":
        samples = []
        for turn in range(warm_up, warm_up + runs):
            start = time.perf_counter()
            result = call(turn)
            samples.append(1e6 * (time.perf_counter() - start))
            kept.append(result)
        return Times.of(samples)

    import torch

    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    torch.cuda.synchronize()
    for turn, (start, end) in enumerate(events, warm_up):
        start.record()
        kept.append(call(turn))
        end.record()
    torch.cuda.synchronize()
    samples = [1e3 * start.elapsed_time(end) for start, end in events]
    turns = range(warm_up + runs, warm_up + 2 * runs)
    launches = launches_of(lambda turn: kept.append(call(turn)), turns, device)
    return Times.of(samples, sums_per_call(launches, runs))


def launches_of(call: Callable[[int], object], turns: range, device: str) -> list[tuple[str, float]]:
    """(name, microseconds) of all that runs on the device in those turns: kernels, copies and fills of a GPU."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for turn in turns:
            call(turn)
        if cuda:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return [(e.name, e.time_range.elapsed_us()) for e in profiler.events() if e.device_type == wanted]


def sums_per_call(launches: list[tuple[str, float]], calls: int) -> dict[str, float]:
    """Microseconds by kernel name in a call, the median launch times the launches in a call."""
    by_name: dict[str, list[float]] = {}
    for name, spent in launches:
        by_name.setdefault(name, []).append(spent)
    return {name: statistics.median(spent) * len(spent) / calls for name, spent in by_name.items()}
