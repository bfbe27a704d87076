"""How long a product with packed weights should take on a GPU: the rates of its parts, and every overhead.

Nothing here is measured. The kernels' shares come from the rule that the kernels follow (schedule.py), what a weight
asks for from SASS, the GPU's rates from its data sheet; what is assumed beyond that is in costs.py.
Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..reference_tiles import segment_stages
from .costs import ASSUMED, COPY_OPERATIONS, OPERATIONS, PATCHES, Assumptions, bits_per_weight
from .rates import ISSUE, PIPES, SHARED_WAVEFRONTS, TENSOR, Gpu
from .schedule import BLOCK_ROWS, STAGE_COLUMNS, Matrix, Share, shares_of

STAGE_WEIGHTS = BLOCK_ROWS * STAGE_COLUMNS
WAVEFRONT_BYTES = 128
PIECES = "sum of pieces"  # the part of a prediction that the last of a block's CTAs takes to add them up
KSTEP_WEIGHTS = BLOCK_ROWS * 16


@dataclass(frozen=True)
class Config:
    """An instance of the kernel: csrc/cuda/linear/config.h."""

    tokens: int
    warpgroups: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens"


CONFIGS = tuple(Config(tokens, 3 if tokens <= 64 else 2) for tokens in (8, 16, 32, 64, 128, 256))


@dataclass(frozen=True)
class Product:
    """One launch: x times several weights, or times the experts of a stack.

    `tokens`: rows of x for each of `shapes` (out_features, in_features). An expert that no token goes to has 0.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, *shapes: tuple[int, int]) -> Product:
        """All weights with the same x."""
        return cls(shapes, (tokens,) * len(shapes))

    @property
    def weights(self) -> int:
        """That are read."""
        return sum(n * k for (n, k), tokens in zip(self.shapes, self.tokens, strict=True) if tokens)

    def hit(self) -> list[tuple[Matrix, int]]:
        """(matrix, its tokens), of those that have any."""
        found = []
        for (n, k), tokens in zip(self.shapes, self.tokens, strict=True):
            if tokens:
                found.append((Matrix(n, k, segment_stages(n, k)), tokens))
        return found


@dataclass(frozen=True)
class Prediction:
    """Of one way to do a product. Microseconds."""

    parts: Mapping[str, float]  # which add up to `microseconds`
    hbm: float  # of the compressed bytes: no product can be faster
    cublas: float  # with BF16 weights
    limiter: str  # of the busiest CTA's loop
    busiest: float  # the stages of the busiest CTA, times an equal share of every SM
    demand: Mapping[str, float]  # of the loop, by resource: clocks of an SM for a weight
    l2_terabytes: float  # a second, from the L2 to the SMs while the loop runs at this speed: weights, x, partial sums

    @property
    def microseconds(self) -> float:
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """To the time of the compressed bytes."""
        return self.microseconds / self.hbm

    @property
    def against_cublas(self) -> float:
        """How many times faster."""
        return self.cublas / self.microseconds


def demand_of(layout: str, config: Config, active: int, bytes_per_weight: float, assumed: Assumptions) -> dict:
    """Clocks of an SM for one weight, by resource but HBM, where `active` warpgroups share x."""
    operations = dict(OPERATIONS[layout])
    for pipe, more in PATCHES[layout].items():
        operations[pipe] = operations.get(pipe, 0.0) + more
    pieces = config.tokens * STAGE_COLUMNS * 2 / 16 / (active * STAGE_WEIGHTS)  # of 16 bytes of x, for a weight
    operations["LSU"] += pieces
    operations["other"] += (COPY_OPERATIONS - 1) * pieces
    # Written by the copy, read by the lanes; huffman looks each pair up; x is read by each wgmma, written once.
    wavefronts = 2 * bytes_per_weight / WAVEFRONT_BYTES + (1 / 64 if layout == "huffman" else 0)
    wavefronts += config.tokens * 32 / WAVEFRONT_BYTES / KSTEP_WEIGHTS + pieces * 16 / WAVEFRONT_BYTES
    wgmma = max(assumed.least_wgmma_clocks, config.tokens * KSTEP_WEIGHTS / TENSOR)
    clocks = {pipe: operations.get(pipe, 0.0) / rate for pipe, rate in PIPES.items()}
    return {
        "shared memory": wavefronts / SHARED_WAVEFRONTS,
        "issue": sum(operations.values()) / ISSUE,
        "tensor": wgmma / KSTEP_WEIGHTS,
        **clocks,
    }


def predict(
    product: Product, layout: str, config: Config, gpu: Gpu, assumed: Assumptions = ASSUMED, *, chained: bool = True
) -> Prediction:
    """Of the fused product. `chained`: it follows one of the same kind, and so was launched before that one ended."""
    hit = product.hit()
    tiles = tuple((matrix, -(-tokens // config.tokens)) for matrix, tokens in hit)
    shares = shares_of(tiles, config.warpgroups, gpu.multiprocessors)
    total = sum(m.blocks * m.stages * t for m, t in tiles)
    hbm_bytes = sum(m.out_features * m.in_features * bits_per_weight(layout, m.segment_stages) / 8 for m, _ in hit)
    per_weight = hbm_bytes / product.weights
    many = config.tokens > 64
    slower = 1 / assumed.at_many_tokens(layout) if many else 1.0

    def of_round(active: int) -> dict[str, float]:
        demand = demand_of(layout, config, active, per_weight, assumed)
        demand["tensor"] *= slower
        return {"HBM": per_weight / gpu.hbm_bytes, **demand}

    by_active = {active: of_round(active) for active in range(1, config.warpgroups + 1)}

    def clocks_of(share: Share) -> float:
        return sum(max(by_active[r.active].values()) * r.active * r.stages * STAGE_WEIGHTS for r in share.rounds)

    slowest = max(shares, key=clocks_of)
    loop = clocks_of(slowest)
    full = by_active[config.warpgroups]
    # Of the last stage: it is there, and still has to be decoded and multiplied.
    last = max(v for name, v in full.items() if name != "HBM") * slowest.rounds[-1].active * STAGE_WEIGHTS
    gather = _gather(config, shares, gpu, assumed)
    # Header, index, stage (or table), one after the other: from the L2 if they were asked for before the wait.
    prefetched = chained and assumed.prefetches
    latency = assumed.l2_latency if prefetched else assumed.hbm_latency
    filled = 2 * latency + max(latency, assumed.table_fill if layout == "huffman" else 0.0)
    parts = {
        "loop": gpu.microseconds(loop),
        "launch": assumed.dependent_launch if chained else assumed.launch,
        "pipeline fill and table": filled,
        "last stage": gpu.microseconds(last),
        "store": assumed.store,
        PIECES: gather,
    }
    if prefetched:
        # What the memory brings into the L2 while the one before adds its pieces up. The first stages are asked for
        # when their index entries are there.
        window = max(0.0, gather + assumed.dependent_launch - assumed.hbm_latency)
        parts["prefetched"] = -min(window, gpu.microseconds(_ring_bytes(config, layout, per_weight) / gpu.hbm_bytes))
    partial_bytes = 4.0 * BLOCK_ROWS * config.tokens * sum(share.pieces for share in shares)
    x_bytes = sum(2.0 * config.tokens * STAGE_COLUMNS * sum(r.stages for r in share.rounds) for share in shares)
    streamed = total * STAGE_WEIGHTS * per_weight + x_bytes + 2 * partial_bytes
    return Prediction(
        parts,
        hbm_bytes / (gpu.hbm_gb_per_second * 1e3),
        cublas_microseconds(product, gpu, assumed),
        max(full, key=full.__getitem__),
        max(share.block_stages for share in shares) * gpu.multiprocessors / total,
        full,
        streamed / parts["loop"] / 1e6,
    )


def _ring_bytes(config: Config, layout: str, per_weight: float) -> float:
    """Of weights that a CTA asks for ahead: its ring's."""
    stages = {"huffman": 3, "nibble": 4, "raw": 3}[layout] if config.tokens <= 64 else 2
    return stages * config.warpgroups * STAGE_WEIGHTS * per_weight


def _gather(config: Config, shares: Sequence[Share], gpu: Gpu, assumed: Assumptions) -> float:
    """Microseconds until who has the last segments of a block has added up its pieces, from the end of its loop."""
    pieces = sum(share.pieces for share in shares)
    if not pieces:
        return 0.0
    # Each writes and reads 64 rows of sums, all through the L2. The sums are stored, a flag is seen, sums are read.
    clocks = 2 * 4 * BLOCK_ROWS * config.tokens * pieces / gpu.multiprocessors / assumed.l2_bytes
    return 3 * assumed.l2_latency + gpu.microseconds(clocks)


def cublas_microseconds(product: Product, gpu: Gpu, assumed: Assumptions = ASSUMED) -> float:
    """Of torch's own product with BF16 weights: 88 % of the memory's rate, or all of the tensor cores'."""
    memory = 2 * product.weights / (assumed.cublas_share_of_hbm * gpu.hbm_gb_per_second * 1e3)
    pairs = zip(product.shapes, product.tokens, strict=True)
    multiplications = sum(n * k * tokens for (n, k), tokens in pairs)
    return max(memory, gpu.microseconds(multiplications / (TENSOR * gpu.multiprocessors)))


def predict_scratch(product: Product, layout: str, gpu: Gpu, assumed: Assumptions = ASSUMED) -> Prediction:
    """Of decoding everything to BF16 and torch's own product."""
    hit = product.hit()
    hbm_bytes = sum(m.out_features * m.in_features * bits_per_weight(layout, m.segment_stages) / 8 for m, _ in hit)
    cublas = cublas_microseconds(product, gpu, assumed)
    moved = hbm_bytes + 2 * product.weights
    parts = {
        "unpack": moved / (gpu.hbm_gb_per_second * 1e3),
        "product": cublas,
        "launch": 3 * assumed.launch,  # unpack, the product, what makes damage visible
    }
    demand = {"HBM": moved / product.weights / gpu.hbm_bytes}
    return Prediction(parts, hbm_bytes / (gpu.hbm_gb_per_second * 1e3), cublas, "HBM", 1.0, demand, 0.0)


def candidates(tokens: int) -> list[Config]:
    """Instances that a product of so many tokens may run: up to 64 one that takes all at once."""
    if tokens <= 64:
        return [config for config in CONFIGS if tokens <= config.tokens <= 64]
    return [config for config in CONFIGS if config.tokens > 64]


def best(
    tokens: int, layout: str, products: Sequence[Product], gpu: Gpu, assumed: Assumptions = ASSUMED
) -> Config | None:
    """The way that takes the least time over `products`, which have `tokens` rows of x; None for scratch.

    Up to 64 tokens it is the smallest instance, whatever would be fastest: see csrc/cuda/linear/choice.h.
    """
    if tokens <= 64:
        return candidates(tokens)[0]
    spent = {
        config: sum(predict(product, layout, config, gpu, assumed).microseconds for product in products)
        for config in candidates(tokens)
    }
    scratch = sum(predict_scratch(product, layout, gpu, assumed).microseconds for product in products)
    config = min(spent, key=spent.__getitem__)
    return config if spent[config] <= scratch else None
