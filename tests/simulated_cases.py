"""The operators for CUDA tensors on the interpreter: a program, since its operators are those of a library of its own.

python tests/simulated_cases.py LIBRARY CASE
"""

from __future__ import annotations

import sys

import simulated_products
import torch
from samples import LAYOUTS, assert_same_bits, assert_same_bytes, weight
from simulated_gpu import Gpu, pack, refused


def unpack(gpu: Gpu) -> None:
    w = weight("few outsiders", 70, 200)
    for layout in LAYOUTS:
        packed = pack("few outsiders", 70, 200, layout)
        assert_same_bits(gpu.call("unpack", packed, 200, torch.bfloat16), w)
        assert_same_bits(gpu.call("_unpack", packed, 200, 3), w)
    refused(gpu, "in_features: 201, expected 200, the in_features", "unpack", packed, 201, torch.bfloat16)
    refused(gpu, "in_features: 70000, expected that of packed_w, whose", "unpack", packed, 70000, torch.bfloat16)
    packed[-1, -1] += 1
    refused(gpu, "packed: ", "unpack", packed, 200, torch.bfloat16)


def stacks(gpu: Gpu) -> None:
    w = torch.stack([weight("trained", 16, 40, seed) for seed in range(3)])
    packed = torch.ops.unweight._pack(w, 1, [16, 40], 0)
    assert_same_bits(gpu.call("unpack", packed, 40, torch.bfloat16), w)
    gpu.call("_verify", packed)
    assert_same_bytes(gpu.call("_transcode", packed, 2, 0), torch.ops.unweight._transcode(packed, 2, 0))
    assert gpu.call("unpack", packed[:0], 40, torch.bfloat16).shape == (0, 16, 40)
    gpu.call("_verify", packed[:0])
    refused(gpu, "row_bytes: 9223372036854775807, expected 1 to ", "_resize", packed[:0], 2**63 - 1)


def transcode(gpu: Gpu) -> None:
    packed = pack("trained", 70, 200, "archive")
    for layout in range(4):
        assert_same_bytes(gpu.call("_transcode", packed, layout, 0), torch.ops.unweight._transcode(packed, layout, 0))
    weight_again = gpu.call("_pack", weight("trained", 70, 200), 3, [70, 200], 0)
    assert_same_bytes(weight_again, packed)


def embedding(gpu: Gpu) -> None:
    w = weight("few outsiders", 70, 200)
    for layout in LAYOUTS:
        packed = pack("few outsiders", 70, 200, layout)
        for ids in (
            torch.tensor([[3, 69], [0, 3]]),
            torch.tensor([5, 64], dtype=torch.int32),
            torch.tensor([])[:0].long(),
        ):
            assert_same_bits(gpu.call("embedding", ids, packed, 200), w[ids.long()])
    rows = gpu.call("embedding", torch.tensor([1, 70, -1]), packed, 200)
    assert_same_bits(rows[0], w[1])
    assert (rows[1:].view(torch.int16) == 0x7FFF).all()
    refused(gpu, "ids: dtype torch.float32, expected torch.int64", "embedding", torch.zeros(1), packed, 200)
    ids = torch.tensor([1])
    refused(gpu, "embedding_dim: 70000, expected that of packed_w, whose", "embedding", ids, packed, 70000)


def headers(gpu: Gpu) -> None:
    for layout in LAYOUTS:
        packed = pack("trained", 70, 200, layout)
        gpu.call("_verify", packed)
        assert torch.equal(gpu.call("_describe", packed), torch.ops.unweight._describe(packed))
        for row_bytes in (packed.shape[1], packed.shape[1] + 33):
            expected = torch.ops.unweight._resize(packed, row_bytes)
            assert_same_bytes(gpu.call("_resize", packed, row_bytes), expected)
        refused(gpu, "row_bytes: 1, expected at least ", "_resize", packed, 1)
        other = packed.view(35, -1)
        for name, *arguments in (("_verify",), ("_describe",), ("_resize", other.shape[1]), ("_transcode", 0, 0)):
            refused(gpu, "packed_w: its shape says 35 out_features, its header 70", name, other, *arguments)


def capture(gpu: Gpu) -> None:
    packed = pack("trained", 70, 200, "nibble")
    gpu.captured = True
    for name, *arguments in (
        ("unpack", 200, torch.bfloat16),
        ("_verify",),
        ("_describe",),
        ("_transcode", 1, 0),
        ("_resize", 999),
    ):
        refused(gpu, f"packed_w: {name} waits for the GPU, which a stream that is being", name, packed, *arguments)
    assert_same_bits(gpu.call("embedding", torch.tensor([2]), packed, 200), weight("trained", 70, 200)[2:3])


def other_gpus(gpu: Gpu) -> None:
    """All but the fused product, with the plans and the code of GPUs before Hopper."""
    w, x, ids = weight("few outsiders", 70, 200), weight("trained", 3, 200), torch.tensor([64, 3])
    gpu.become(86)
    for layout in LAYOUTS:
        packed = pack("few outsiders", 70, 200, layout)
        assert_same_bits(gpu.call("unpack", packed, 200, torch.bfloat16), w)
        assert_same_bits(gpu.call("embedding", ids, packed, 200), w[ids])
        assert_same_bits(gpu.call("linear", x, packed, exact=True), torch.nn.functional.linear(x, w))
        gpu.call("_verify", packed)
    for layout in range(3):
        assert_same_bytes(gpu.call("_transcode", packed, layout, 0), torch.ops.unweight._transcode(packed, layout, 0))
    packed = pack("trained", 70, 200, "nibble")
    for capability in (80, 86, 89, 100, 120):
        gpu.become(capability)
        # Many rows are multiplied in scratch on Hopper; a model learns at its first call that it isn't one.
        for rows in (1, 3000):
            found = f"device: cuda:0 has compute capability {capability / 10}, expected 9.0 (Hopper: H100, H200, GH200)"
            refused(gpu, found, "linear", torch.zeros(rows, 200, dtype=torch.bfloat16), packed)
    gpu.become(75)
    for name, *arguments in (
        ("unpack", packed, 200, torch.bfloat16),
        ("_verify", packed),
        ("embedding", ids, packed, 200),
    ):
        refused(gpu, "device: cuda:0 has compute capability 7.5, expected 8.0 or newer", name, *arguments)


CASES = (unpack, stacks, transcode, embedding, headers, capture, other_gpus, *simulated_products.CASES)

if __name__ == "__main__":
    gpu = Gpu(sys.argv[1])
    next(case for case in CASES if case.__name__ == sys.argv[2])(gpu)
    print("ok,", len(gpu.device.launched), "launches")
