"""What an operator on a GPU runs: the rule of csrc/cuda/linear/choice.cpp, for explanations and measurements.

Needs neither torch nor the compiled part.
"""

from __future__ import annotations

from .costs import TILED
from .predict import CONFIGS
from .schedule import INVARIANT_TOKENS, Config

BUCKETS = tuple(8 << power for power in range(12))  # 8…16384: choices are for the next of them
SCRATCH_FROM = {"raw": 2048, "huffman": 2048, "nibble": 8192}


def bucket_of(tokens: int) -> int:
    return next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])


def default_choice(layout: str, tokens: int) -> Config | None:
    """What runs without a measurement; None: decoded to scratch."""
    if layout not in TILED or (tokens > INVARIANT_TOKENS and tokens >= SCRATCH_FROM[layout]):
        return None
    if takes_all := [config for config in CONFIGS if tokens <= config.tokens]:
        return takes_all[0]
    smaller, largest = CONFIGS[-2:]
    cheaper = layout != "raw" and 16 * -(-tokens // smaller.tokens) < 25 * -(-tokens // largest.tokens)
    return smaller if cheaper else largest
