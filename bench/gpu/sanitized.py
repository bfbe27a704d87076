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
    print(f"{ran} operators ran")


def _expect_nothing(found: str | None, what: str) -> None:
    if found:
        sys.exit(f"{what}: {found}")


if __name__ == "__main__":
    import unweight_ext.ops  # noqa: F401 (registers the operators)

    main()
