"""A small run of every kernel, for compute-sanitizer: python -m bench.gpu.sanitized [DEVICE]"""

from __future__ import annotations

import sys

from .record import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    from . import exact

    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    # Several stages, a second segment's start and both tails; patches, raw stages and zero rows.
    cases = [exact.Case(content, (70, 1290)) for content in ("few outsiders", "one bad stage", "zero rows")]
    ran = 0
    for case in cases:
        for layout in exact.LAYOUTS:
            for check in (exact.check_unpack, exact.check_embedding, exact.check_verify):
                _expect_nothing(check(case, layout, device), f"{check.__name__} {layout} {case}")
                ran += 1
        for pair in exact.TRANSCODES:
            _expect_nothing(exact.check_transcode(case, pair, device), f"transcode {pair} {case}")
            ran += 1
    ran += _products(device)
    print(f"{ran} operators ran")


def _products(device: str) -> int:
    """With each layout: few rows and many, experts, and blocks that several CTAs have parts of."""
    import torch

    from . import products

    if device == "cuda":
        # Products may find anything in the memory of their flags, and look: the allocator hands this out again.
        blocks = [torch.zeros(1 << size, dtype=torch.uint8, device=device) for size in range(9, 25) for _ in range(4)]
        del blocks
    ran = 0
    for layout in products.LAYOUTS:
        columns = 2180  # of two segments, so that blocks are cut
        packed = products.packed_weight(layout, 70, columns, device)
        for rows in (3, 70):
            y = products.operators().linear(products.random_x(rows, columns, device), packed, None, packed)
            _expect_nothing(None if y.isfinite().all() else "not finite", f"linear {layout} {rows}")
            ran += 1
        offs = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
        stack = packed.expand(3, *packed.shape).contiguous()
        y = products.operators().grouped_linear(products.random_x(5, columns, device), stack, offs)
        _expect_nothing(None if y.isfinite().all() else "not finite", f"grouped_linear {layout}")
        ran += 1
    return ran


def _expect_nothing(found: str | None, what: str) -> None:
    if found:
        sys.exit(f"{what}: {found}")


if __name__ == "__main__":
    import unweight_ext.ops  # noqa: F401 (registers the operators)

    main()
