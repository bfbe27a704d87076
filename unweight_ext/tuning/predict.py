"""How long a product with packed weights should take on a GPU: the rates of its parts, and every overhead.

Nothing here is measured. The kernels' shares come from the rule that the kernels follow (schedule.py), what a weight
asks for from SASS, the GPU's rates from its data sheet; what is assumed beyond that is in costs.py.
Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..reference_tiles import segment_stages
from .costs import (
    ASSUMED,
    COPY_OPERATIONS,
    HINTED_STAGES,
    OPERATIONS,
    PATCHES,
    PIECES_AT_ONCE,
    SLOTS,
    Assumptions,
    bits_per_weight,
)
from .fluid import Around, Load, Memory, loop_end
from .rates import ISSUE, PIPES, SHARED_WAVEFRONTS, TENSOR, Gpu
from .schedule import BLOCK_ROWS, INVARIANT_TOKENS, STAGE_COLUMNS, Config, Matrix, Share, shares_of

STAGE_WEIGHTS = BLOCK_ROWS * STAGE_COLUMNS
WAVEFRONT_BYTES = 128
KSTEP_WEIGHTS = BLOCK_ROWS * 16

CONFIGS = tuple(Config(tokens, 3 if tokens <= 64 else 2) for tokens in (8, 16, 32, 64, 128, 256))


@dataclass(frozen=True)
class Product:
    """One launch: x times several weights, or times several stacks of experts.

    `shapes`: (out_features, in_features) of each weight. `tokens`: rows of x of each matrix of a weight; several are
    experts, and one that no token goes to has 0.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, *shapes: tuple[int, int]) -> Product:
        """Weights without experts."""
        return cls(shapes, (tokens,))

    @property
    def experts(self) -> bool:
        return len(self.tokens) > 1

    @property
    def takes_hint(self) -> bool:
        """Whether the product before it is told that it comes: of one weight, and where it waits for the memory."""
        return len(self.shapes) == 1 and not self.experts and sum(self.tokens) <= INVARIANT_TOKENS

    @property
    def hit(self) -> int:
        """Matrices of a weight that have rows."""
        return sum(rows > 0 for rows in self.tokens)

    @property
    def weights(self) -> int:
        """That are read."""
        return self.hit * sum(n * k for n, k in self.shapes)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """One of each weight."""
        return tuple(Matrix(n, k, segment_stages(n, k)) for n, k in self.shapes)

    def packed_bytes(self, layout: str) -> float:
        """That are read."""
        matrices = self.matrices
        return self.hit * sum(
            m.out_features * m.in_features * bits_per_weight(layout, m.segment_stages) / 8 for m in matrices
        )


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
        "L2": (bytes_per_weight + (16 * pieces if assumed.x_takes_l2 else 0)) / assumed.l2_bytes,
        **clocks,
    }


def predict(
    product: Product,
    layout: str,
    config: Config,
    gpu: Gpu,
    assumed: Assumptions = ASSUMED,
    *,
    chained: bool = True,
    hinted: bool = False,
) -> Prediction:
    """Of the fused product. `chained`: one of a sequence of such products, each launched before the one before ended.
    `hinted`: and each is told which weight comes next."""
    if hinted and not (chained and product.takes_hint):
        raise ValueError("hinted: of a chain of products with one weight without experts and of few rows")
    matrices = product.matrices
    shares = shares_of(matrices, product.tokens, config, gpu.multiprocessors)
    tiles = sum(-(-rows // config.tokens) for rows in product.tokens)
    stages = tiles * sum(m.cost for m in matrices)
    hbm_bytes = product.packed_bytes(layout)
    per_weight = hbm_bytes / product.weights
    slower = 1 / assumed.at_many_tokens(layout) if config.tokens > 64 else 1.0

    def of_round(active: int) -> dict[str, float]:
        demand = demand_of(layout, config, active, per_weight, assumed)
        demand["tensor"] *= slower
        return demand

    by_active = {active: of_round(active) for active in range(1, config.warpgroups + 1)}
    rows = sum(product.tokens) / tiles  # of a tile
    slots = SLOTS[layout][config.tokens]
    clocks = 1e3 * gpu.clock_ghz
    memory = Memory(gpu.hbm_bytes * gpu.multiprocessors, assumed.hbm_latency * clocks)

    def load_of(share: Share) -> Load:
        own = sum(max(by_active[r.active].values()) * r.active * r.stages * STAGE_WEIGHTS for r in share.rounds)
        own += 4.0 * BLOCK_ROWS * rows * share.published / assumed.l2_bytes
        first, last = share.rounds[0], share.rounds[-1].active
        # Of the last stage: it is there, and still has to be decoded and multiplied.
        behind = max(v for name, v in by_active[last].items() if name != "L2") * last * STAGE_WEIGHTS
        # Of the blocks of the first segment; without a hint as many as the ring has for whole groups.
        most, here = HINTED_STAGES if hinted else slots * config.warpgroups, share.groups[0].rounds
        there = sum(min(r.active, first.active) * r.stages for r in here) // first.active
        asked = min(most // first.active, there) * first.active
        stage = STAGE_WEIGHTS * per_weight
        # The ring takes as many of the last segment's; the memory answers that much later than it is asked.
        weight_bytes = share.block_stages * stage
        late = memory.latency * weight_bytes / own
        ahead = max(stage, (slots - 1) * last * stage - late)
        return Load(1, weight_bytes, own, behind, asked * stage, ahead)

    alike = Counter(load_of(share) for share in shares if share.groups)
    loads = sorted((replace(load, ctas=n) for load, n in alike.items()), key=lambda load: load.weight_bytes)
    gather = gather_of(shares, rows, config, gpu, assumed)
    launch = assumed.dependent_launch if chained else assumed.launch
    fill = fill_of(layout, product.experts, assumed.store + launch if chained else None, assumed, hinted)
    around = Around(
        arrival=fill.arrival * clocks,
        consumers=fill.consumers * clocks,
        behind=(gather + assumed.store + launch + fill.copies) * clocks,
        asks=(gather + fill.asks) * clocks if chained and fill.asks is not None else None,
        hints=3 * memory.latency if hinted else None,  # header, index, stage
    )
    alone = loop_end(loads, memory, None) / clocks
    last = loads[-1].last / clocks
    parts = {
        "loop": alone - last,
        "last stage": last,
        "sum of pieces": gather,
        "store": assumed.store,
        "launch": launch,
        "first reads and table": fill.copies + fill.consumers,
    }
    # What of that goes on at the same time: of this product, and of the ones before and behind it.
    parts["at once"] = fill.copies + loop_end(loads, memory, around) / clocks - alone - parts["first reads and table"]
    partial_bytes = 4.0 * BLOCK_ROWS * rows * sum(share.published + share.gathered for share in shares)
    x_bytes = sum(2.0 * rows * STAGE_COLUMNS * sum(r.stages for r in share.rounds) for share in shares)
    streamed = stages * STAGE_WEIGHTS * per_weight + x_bytes + partial_bytes
    full = {"HBM": per_weight / gpu.hbm_bytes, **by_active[config.warpgroups]}
    return Prediction(
        parts,
        hbm_bytes / (gpu.hbm_gb_per_second * 1e3),
        cublas_microseconds(product, gpu, assumed),
        max(full, key=full.__getitem__),
        max(share.block_stages for share in shares) * gpu.multiprocessors / stages,
        full,
        streamed / alone / 1e6,
    )


@dataclass(frozen=True)
class Fill:
    """How a CTA begins, in microseconds. From `copies` on its ring is filled."""

    copies: float  # from when it may read what kernels before it wrote
    consumers: float  # from the first copies until the first stage can be decoded
    arrival: float  # from there until the first stage's bytes come from the memory, if they weren't asked for before
    asks: float | None  # from the end of the CTA before until it asks for its first stages; None: only its copies do


def fill_of(layout: str, experts: bool, launch: float | None, assumed: Assumptions, hinted: bool) -> Fill:
    """Reads that wait for each other. `launch`: from the end of the CTAs before until what they wrote may be read, if
    they are waited for."""
    table = assumed.table_fill if layout == "huffman" else 0.0
    if experts or not assumed.prefetches:
        # Heads of experts are asked for early; they come before the launch is over where it waits for others.
        head = assumed.l2_latency if experts and assumed.prefetches and launch is not None else assumed.hbm_latency
        # Copies: offsets, header, index. Consumers: offsets, header, counts and symbols of the code.
        rows = assumed.l2_latency if experts else 0.0
        code = rows + 3 * head + table if table else 0.0
        copies = rows + head + assumed.hbm_latency
        return Fill(copies, max(assumed.hbm_latency, code - copies), assumed.hbm_latency, None)
    # Header and index are read before, to ask for stages; from the L2 if there was a hint.
    asks = (assumed.cta_start if launch is not None else 0.0) + 2 * (
        assumed.l2_latency if hinted else assumed.hbm_latency
    )
    # Then again with the code, all at once and to the L1.
    copies = max(0.0, asks - (launch or 0.0)) + assumed.l2_latency
    arrival = max(assumed.l2_latency, asks + assumed.hbm_latency - (launch or 0.0) - copies)
    return Fill(copies, max(arrival, table), arrival, asks)


def gather_of(shares: Sequence[Share], rows: float, config: Config, gpu: Gpu, assumed: Assumptions) -> float:
    """Microseconds from the end of the loops until all blocks are summed. `rows`: of x, of a tile."""
    if not any(share.gathered for share in shares):
        return 0.0

    def at_the_end(share: Share) -> int:
        """Pieces that move then: those that others left, and its own where nothing came behind them."""
        return share.groups[-1].published + share.gathered if share.groups else 0

    # All take from the L2 what it gives all, and none takes more than one SM can.
    piece = 4.0 * BLOCK_ROWS * rows
    together = piece * sum(map(at_the_end, shares)) / gpu.multiprocessors / assumed.l2_bytes
    alone = piece * max(map(at_the_end, shares)) / assumed.l2_bytes_alone
    # The last sums reach the L2; flags of a block's pieces are seen, then their sums are read, some at once.
    published = any(share.groups and share.groups[-1].published for share in shares)
    chain = max(pieces for share in shares for group in share.groups for pieces in group.gathered)
    reads = -(-chain // PIECES_AT_ONCE[config.tokens])
    return (published + 1 + reads) * assumed.l2_latency + gpu.microseconds(max(together, alone))


def cublas_microseconds(product: Product, gpu: Gpu, assumed: Assumptions = ASSUMED) -> float:
    """Of torch's own product with BF16 weights: 88 % of the memory's rate, or all of the tensor cores'."""
    memory = 2 * product.weights / (assumed.cublas_share_of_hbm * gpu.hbm_gb_per_second * 1e3)
    multiplications = sum(n * k for n, k in product.shapes) * sum(product.tokens)
    return max(memory, gpu.microseconds(multiplications / (TENSOR * gpu.multiprocessors)))


def predict_scratch(product: Product, layout: str, gpu: Gpu, assumed: Assumptions = ASSUMED) -> Prediction:
    """Of decoding everything to BF16 and torch's own product."""
    hbm_bytes = product.packed_bytes(layout)
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
