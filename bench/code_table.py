"""What the rules of the code tables cost: bits per weight by the limit on code length and by the number of codes.

    python bench/code_table.py [CHECKPOINT]

The encoder keeps a pair if it is seen at least once in 2^12 (huffman) or 2^17 (archive) pairs. Here: the cost with that
rule, with the best number of codes found by trying, and the entropy, weighted over all matrices. Patches included (32
and 48 bits), signs and mantissas (8 bits) not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import weights
from safetensors.torch import load_file

from unweight_ext import reference_code

LIMITS = {"huffman": (8, 12, 32), "archive": (12, 17, 48)}  # longest code, rarity, bits of a patch


def cost(counts: np.ndarray, codes: int, longest: int, patch_bits: int) -> float:
    """Bits a weight for `codes` codes; `counts` falls."""
    kept = counts[:codes].copy()
    rare = counts[codes:].sum()
    kept[0] += rare
    lengths = reference_code.package_merge(kept, longest)
    return float((kept * lengths).sum() + rare * patch_bits) / (2 * counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="a BF16 checkpoint folder (default: all-mpnet-base-v2)"
    )
    source = parser.parse_args().checkpoint or weights.mpnet()
    total = dict.fromkeys(
        ("entropy of pairs", *(f"{name}, {rule}" for name in LIMITS for rule in ("rule", "best"))), 0.0
    )
    elements = 0
    for file in sorted(source.rglob("*.safetensors")):
        for tensor in load_file(file).values():
            if tensor.dtype != torch.bfloat16 or tensor.ndim != 2 or tensor.shape[1] % 2 or tensor.numel() < 1 << 16:
                continue
            exponents = (tensor.view(torch.int16).numpy().astype(np.uint16).ravel() >> 7) & 255
            counts = np.bincount(exponents[::2] | exponents[1::2].astype(np.int64) << 8)
            counts = -np.sort(-counts[counts > 0])
            share = counts / counts.sum()
            total["entropy of pairs"] -= float((share * np.log2(share)).sum()) / 2 * tensor.numel()
            for name, (longest, rarity, patch_bits) in LIMITS.items():
                rule = max(1, min(int((counts << rarity >= counts.sum()).sum()), 1 << longest))
                tries = {rule, *range(max(1, rule * 3 // 4), min(rule * 4 // 3, 1 << longest, len(counts)), 4)}
                total[f"{name}, rule"] += cost(counts, rule, longest, patch_bits) * tensor.numel()
                total[f"{name}, best"] += min(cost(counts, n, longest, patch_bits) for n in tries) * tensor.numel()
            elements += tensor.numel()
    for name, bits in total.items():
        print(f"{name:20} {bits / elements:.4f} bits per weight")


if __name__ == "__main__":
    main()
