"""Every kernel of the project is executed: none can be added without a driver that the interpreter runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from cuda_reading import ANY, Loaded, layout_number, pack
from linear_product import CONFIGS, Product, Weight, tokens
from native_module import native
from ptxsim.device import SimulatedDevice
from samples import LAYOUTS, weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import native_build


def test_every_kernel_runs() -> None:
    launched: set[str] = set()
    for layout in LAYOUTS:
        packed = pack(weight("any bits" if layout == "raw" else "trained", 64, 128), layout)
        for known in (ANY, layout_number(layout)):
            loaded = Loaded(packed, 128, layout=known)
            loaded.unpack()
            loaded.embedding([3])
            launched.update(loaded.device.launched)
    archive = pack(weight("trained", 64, 128), "archive")
    for target in ("raw", "huffman", "nibble"):
        device = SimulatedDevice()
        address = device.tensor(archive, "packed")
        layout, row_bytes, out = native.transcode(
            device, address, archive.numel(), 1, 64, 128, layout_number(target), False, 1 << 20
        )
        assert layout == layout_number(target)
        device.read(out, np.uint8, (64, row_bytes))  # all of it was written
        launched.update(device.launched)
    for layout in ("raw", "huffman", "nibble"):
        packed = pack(weight("any bits" if layout == "raw" else "trained", 64, 128), layout).numpy()
        for known in (ANY, layout_number(layout)) if layout == "huffman" else (layout_number(layout),):
            for config in CONFIGS:
                product = Product([Weight(packed, 128, layout=known)], tokens(2, 128), config)
                product.check()
                launched.update(product.device.launched)
    device = SimulatedDevice()
    native.poison(device, device.tensor(np.ones(1, np.uint64), "status"), device.allocate(16, "y"), 16)
    launched.update(device.launched)
    assert launched == {name for source in native_build.cuda_sources() for name in native_build.kernel_names(source)}
