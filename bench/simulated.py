"""What the kernels do for a weight, counted by the tests' PTX interpreter on small packed matrices.

Each case runs twice, on a small and on a larger sample; the difference is what a further weight costs, without the
start of a CTA (the code table, the header's checks), which large matrices spread over hundreds of thousands of weights.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from ptxsim.compiler import find_kernel  # noqa: E402
from ptxsim.counters import Counters  # noqa: E402
from ptxsim.device import SimulatedDevice  # noqa: E402
from ptxsim.memory import SharedLayout  # noqa: E402

from bench.gpu.timing import weights_like_trained  # noqa: E402
from bench.sass_places import Place, place_of  # noqa: E402

LAYOUTS = ("raw", "huffman", "nibble", "archive")
TRANSCODES = (("archive", "huffman"), ("huffman", "nibble"))
SHAPES = ((64, 512), (64, 1536))  # small and larger: one CTA each, of 4 and of 12 stages
TABLE = (64, 1024)  # what an embedding looks rows up in
ROWS = (2, 6)  # how many rows
STATUS_BYTES = 8


SECTOR = 32


class PlaceCounters(Counters):
    """Also how often the instructions of each place ran, and which parts of memory were accessed at all.

    What is asked for again comes from a cache, so each sector counts once a launch, read or written.
    """

    def clear(self) -> None:
        super().clear()
        self.sectors_read: set[int] = set()
        self.sectors_written: set[int] = set()
        self.runs: Counter[Place] = Counter()  # of all instructions of the place together
        self.instructions: Counter[Place] = Counter()  # how many there are

    def memory(self, warp, region, address: np.ndarray, size: int, write: bool) -> None:
        super().memory(warp, region, address, size, write)
        if region is not warp.cta.shared:
            touched = (self.sectors_written if write else self.sectors_read).update
            touched((address // np.uint64(SECTOR)).tolist())
            touched(((address + np.uint64(size - 1)) // np.uint64(SECTOR)).tolist())

    def add_instructions(self, kernel: str, instructions: list, warps: list[int], threads: list[int]) -> None:
        super().add_instructions(kernel, instructions, warps, threads)
        self.instructions.clear()
        for instruction, count in zip(instructions, warps, strict=True):
            place = place_of(instruction.location.frames)
            self.runs[place] += count
            self.instructions[place] += 1


@dataclass(frozen=True)
class Cost:
    """Of launches of one kernel."""

    bytes_read: float = 0  # of global memory: sectors of 32 bytes, each once, and bulk copies
    bytes_written: float = 0
    bytes_asked: float = 0  # of the L2, read and written, sectors as often as they are asked for
    wavefronts: float = 0  # of shared memory
    conflict_free: float = 0  # wavefronts if no lanes met in a bank
    instructions: float = 0  # of PTX, a lane's: 32 for each that a warp issues, whatever its lanes do
    places: dict[Place, float] = field(default_factory=dict)  # lanes' runs of each PTX instruction there, on average
    threads: int = 0  # of a CTA
    shared_bytes: int = 0  # of a CTA

    def per_weight(self, smaller: Cost, weights: int) -> Cost:
        """Of each of the `weights` that this one handles and `smaller` doesn't."""
        numbers = ((getattr(self, name) - getattr(smaller, name)) / weights for name in NUMBERS)
        places = {place: (runs - smaller.places.get(place, 0.0)) / weights for place, runs in self.places.items()}
        return Cost(*numbers, places, self.threads, self.shared_bytes)

    def __add__(self, other: Cost) -> Cost:
        numbers = (getattr(self, name) + getattr(other, name) for name in NUMBERS)
        places = Counter(self.places)
        places.update(other.places)
        most = max(self.threads, other.threads), max(self.shared_bytes, other.shared_bytes)
        return Cost(*numbers, dict(places), *most)


NUMBERS = tuple(f.name for f in fields(Cost) if f.type == "float")


class CountingDevice(SimulatedDevice):
    """Keeps what each kernel cost."""

    def __init__(self) -> None:
        super().__init__()
        self.machine.counters = PlaceCounters()
        self.costs: dict[str, Cost] = {}

    def launch(
        self, kernel: str, grid: int, block: int, shared_bytes: int, argument: bytes, programmatic: bool = False
    ) -> None:
        counters = self.machine.counters
        counters.clear()
        super().launch(kernel, grid, block, shared_bytes, argument, programmatic)
        # Not the driver's figure alone: arrays of the kernel count as well.
        layout = SharedLayout(find_kernel(kernel), shared_bytes)
        cost = Cost(
            SECTOR * len(counters.sectors_read) + counters.bulk_loaded,
            SECTOR * len(counters.sectors_written) + counters.bulk_stored,
            counters.regions_read.total() + counters.regions_written.total(),
            counters.wavefronts,
            counters.least_wavefronts,
            32 * counters.warp_instructions,
            {place: 32 * runs / counters.instructions[place] for place, runs in counters.runs.items()},
            block,
            layout.used_bytes,
        )
        self.costs[kernel] = self.costs.get(kernel, Cost()) + cost


def _on_device(device: CountingDevice, packed, layout: str, shape: tuple[int, int]):
    """The matrix in the device's memory, as drivers take it."""
    from native_module import native

    address = device.allocate(packed.nbytes, "packed")
    device.upload(address, packed.numpy().tobytes())
    return native.PackedMatrices(address, packed.nbytes, *shape, layout=LAYOUTS.index(layout))


def _status(device: CountingDevice) -> int:
    address = device.allocate(STATUS_BYTES, "status")
    device.clear(address, STATUS_BYTES)
    return address


def _weight(shape: tuple[int, int]):
    return weights_like_trained(*SHAPES[-1]).flatten()[: shape[0] * shape[1]].view(shape)


def _expect(device: CountingDevice, address: int, expected, what: str) -> None:
    """The figures of a run that is wrong would be worth nothing."""
    got = device.download(address, expected.nbytes)
    if got != expected.numpy().tobytes():
        raise AssertionError(f"{what}: the interpreter's result is wrong")


def run_unpack(layout: str, shape: tuple[int, int], out: bool = True) -> dict[str, Cost]:
    """Kernel -> cost of `unpack`, or of `verify` where there is no output."""
    import torch
    from native_module import native

    from unweight_ext.packed import pack_quietly

    device, weight = CountingDevice(), _weight(shape)
    matrix = _on_device(device, pack_quietly(weight, layout), layout, shape)
    status = _status(device)
    if out:
        result = device.allocate(weight.nbytes, "out")
        native.unpack(device, matrix, result, status)
        _expect(device, result, weight.view(torch.int16), f"unpack {layout}")
    else:
        native.verify(device, matrix, status)
    costs = device.costs
    native.raise_damage(device, matrix, status)
    return costs


def run_embedding(layout: str, rows: int) -> dict[str, Cost]:
    import torch
    from native_module import native

    from unweight_ext.packed import pack_quietly

    device, weight = CountingDevice(), _weight(TABLE)
    matrix = _on_device(device, pack_quietly(weight, layout), layout, TABLE)
    ids = torch.arange(rows) * 11 + 1
    where = device.allocate(ids.nbytes, "ids")
    device.upload(where, ids.numpy().tobytes())
    result, status = device.allocate(2 * rows * TABLE[1], "out"), _status(device)
    native.embedding(device, matrix, where, True, rows, result, status)
    _expect(device, result, weight[ids].view(torch.int16), f"embedding {layout}")
    native.raise_damage(device, matrix, status)
    return device.costs


def run_transcode(source: str, target: str, shape: tuple[int, int]) -> dict[str, Cost]:
    from native_module import native

    from unweight_ext.packed import pack_quietly

    device, weight = CountingDevice(), _weight(shape)
    packed = pack_quietly(weight, source)
    matrix = _on_device(device, packed, source, shape)
    _, _, result = native.transcode(
        device, matrix.address, matrix.matrix_bytes, 1, *shape, LAYOUTS.index(target), False, 1 << 24
    )
    _expect(device, result, pack_quietly(weight, target), f"transcode {source} to {target}")
    return device.costs


def cases() -> dict[str, tuple[Callable[[int], dict[str, Cost]], int]]:
    """Name -> (what runs sample 0 and sample 1, the weights that sample 1 has more)."""
    more = SHAPES[1][0] * SHAPES[1][1] - SHAPES[0][0] * SHAPES[0][1]
    looked_up = (ROWS[1] - ROWS[0]) * TABLE[1]
    found: dict[str, tuple[Callable[[int], dict[str, Cost]], int]] = {}
    for layout in LAYOUTS:
        found[f"unpack {layout}"] = (lambda i, x=layout: run_unpack(x, SHAPES[i]), more)
        found[f"verify {layout}"] = (lambda i, x=layout: run_unpack(x, SHAPES[i], out=False), more)
        # Of an archive it decodes the chunk up to the row: what that costs depends on the chunk, so the name says it.
        chunk = f", chunk of {TABLE[0]} rows" if layout == "archive" else ""
        found[f"embedding {layout}{chunk}"] = (lambda i, x=layout: run_embedding(x, ROWS[i]), looked_up)
    for source, target in TRANSCODES:
        found[f"transcode {source}-{target}"] = (
            lambda i, a=source, b=target: run_transcode(a, b, SHAPES[i]),
            more,
        )
    return found


def measure(case: str) -> dict[str, Cost]:
    """Kernel -> what one further weight costs."""
    run, weights = cases()[case]
    smaller, larger = run(0), run(1)
    return {kernel: cost.per_weight(smaller.get(kernel, Cost()), weights) for kernel, cost in larger.items()}
