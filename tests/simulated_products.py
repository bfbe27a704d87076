"""Cases of simulated_cases.py: the products. What the kernel computes bit by bit: tests/test_cuda_linear*.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from products import same, tokens
from samples import LAYOUTS, weight
from simulated_gpu import Gpu, pack, refused

N, K = 70, 200
W = weight("trained", N, K)
BIAS = tokens(N, seed=2)
SEVERAL = (weight("trained", 64, K, 1), weight("trained", 65, K, 2), weight("trained", 128, K, 3))


def close(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor = W, bias: torch.Tensor | None = None) -> None:
    expected = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert y.shape == expected.shape
    eps = torch.finfo(y.dtype).eps if y.dtype == torch.bfloat16 else 1e-6
    assert (y - expected).abs().max() <= eps * expected.abs().max(), (y - expected).abs().max()


def launches(gpu: Gpu, *call: object, **options: object) -> tuple[Any, list[str]]:
    """What a call gives, and the kernels that it launches."""
    before = len(gpu.device.launched)
    result = gpu.call(*call, **options)
    return result, [name.removeprefix("unweight_") for name in gpu.device.launched[before:]]


def linear(gpu: Gpu) -> None:
    x = tokens(3, K)
    for number, layout in enumerate(LAYOUTS[:3]):
        packed = pack("trained", N, K, layout)
        y = gpu.call("linear", x, packed, BIAS, layout=number)
        close(y, x, W, BIAS)
        assert same(gpu.call("linear", x, packed, BIAS), y)
        # The FP32 sums are those that BF16 results are rounded from.
        sums = gpu.call("linear", x, packed, BIAS, layout=number, out_dtype=torch.float32)
        close(sums, x, W, BIAS)
        assert same(sums.bfloat16(), y)
        assert launches(gpu, "linear", x, packed, layout=number)[1][0] == f"linear_{layout}_8"
        assert launches(gpu, "linear", x, packed)[1][0] == "linear_any_8"
        assert gpu.call("linear", x, packed, layout=(number + 1) % 3).isnan().all()  # it is of another layout
        damaged = packed.clone()
        damaged[0, 0] ^= 1  # of the header
        assert gpu.call("linear", x, damaged, layout=number).isnan().all()
        assert gpu.call("linear", x, packed.view(35, -1), layout=number).isnan().all()  # of other out_features
    refused(gpu, "layout: 4, expected 0", "linear", x, packed, layout=4)
    refused(gpu, "bias: shape [3], expected [70]", "linear", x, packed, torch.zeros(3).bfloat16())
    refused(gpu, "bias: dtype torch.float32, expected torch.bfloat16", "linear", x, packed, BIAS.float())
    refused(gpu, "x: dtype torch.float16, expected torch.bfloat16", "linear", x.half(), packed)
    refused(gpu, "x: 0 dimensions", "linear", x[0, 0], packed)
    refused(gpu, "x: no columns", "linear", x[:, :0], packed)
    refused(gpu, "x: in_features (its last dimension): 70000, expected that of", "linear", tokens(1, 70000), packed)
    refused(gpu, "packed_w: shape [1, 70", "linear", x, packed[None])
    refused(gpu, "packed_w: dtype torch.bfloat16, expected torch.uint8", "linear", x, W)
    refused(gpu, "out_dtype: torch.float16, expected None", "linear", x, packed, out_dtype=torch.half)


def scratch(gpu: Gpu) -> None:
    """F.linear with the weight decoded to memory, bit for bit."""
    x = tokens(3, K)
    for number, layout in enumerate(LAYOUTS):
        packed = pack("trained", N, K, layout)
        for dtype in (torch.bfloat16, torch.float32):
            rows, bias = x.to(dtype), BIAS.to(dtype)
            expected = F.linear(rows, W.to(dtype), bias)
            assert same(gpu.call("linear", rows, packed, bias, exact=True), expected)
            if dtype == torch.float32 or layout == "archive":
                assert same(gpu.call("linear", rows, packed, bias, layout=number), expected)
        wide = gpu.call("linear", x, packed, BIAS, exact=True, out_dtype=torch.float32)
        assert same(wide, F.linear(x.float(), W.float(), BIAS.float()))
        strided = x.t().contiguous().t()
        assert same(gpu.call("linear", strided, packed, exact=True, layout=number), F.linear(strided, W))
        damaged = packed.clone()
        damaged[-1, -1] += 1  # padding, which only checksums and unpack look at
        assert gpu.call("linear", x[:1], damaged, exact=True).isnan().all()
        assert layout != "raw" or gpu.call("linear", x.float(), damaged, exact=True).isnan().all()
    # A caller that knows the layout gets its own kernel.
    packed = pack("trained", N, K, "huffman")
    _, names = launches(gpu, "linear", x, packed, layout=1, exact=True)
    assert "unpack_huffman" in names and not {"unpack_tiles", "unpack_archive"} & set(names)
    assert gpu.call("linear", x, packed, layout=2, exact=True).isnan().all()
    archive = pack("trained", N, K, "archive")
    assert gpu.call("linear", x, archive).isnan().all()  # the header alone says what it is
    empty = gpu.call("linear", x[:0], packed, exact=True)
    assert empty.shape == (0, N) and empty.dtype == torch.bfloat16


def rows(gpu: Gpu) -> None:
    """x as callers have it."""
    packed, flat = pack("trained", N, K, "nibble"), tokens(8, K)

    def call(x: torch.Tensor) -> torch.Tensor:
        return gpu.call("linear", x, packed, BIAS, layout=2)

    y = call(flat)
    close(y, flat, W, BIAS)
    assert same(call(flat[0]), y[0])
    assert same(call(flat.view(2, 4, K)), y.view(2, 4, N))
    assert same(call(flat[::3]), y[::3])
    wide = torch.cat([flat, flat], 1)
    for first in (0, 8, 3):  # aligned, aligned, copied
        x = torch.cat([wide[:, :first], flat, wide], 1)[:, first : first + K]
        assert same(call(x), y)
        assert same(call(x.view(2, 4, K)), y.view(2, 4, N))
    assert same(call(flat.t().contiguous().t()), y)
    assert same(call(flat[:1].expand(5, K)), y[:1].expand(5, N))
    assert same(call(flat.view(2, 4, K).transpose(0, 1)), y.view(2, 4, N).transpose(0, 1))
    for lead in ((0,), (3, 0)):
        assert call(flat.new_empty(*lead, K)).shape == (*lead, N)
    odd = torch.zeros(packed.numel() + 16, dtype=torch.uint8)
    odd = odd[1 + -odd.data_ptr() % 16 :][: packed.numel()].view(packed.shape).copy_(packed)
    assert odd.data_ptr() % 16 == 1 and same(gpu.call("linear", flat, odd, BIAS), y)
    for n, k in ((1, 1), (7, 129), (65, 63)):
        w, x = weight("trained", n, k), tokens(2, k)
        for some in (x, x[:1], tokens(2, 2 * k)[:, k:]):
            close(gpu.call("linear", some, pack("trained", n, k, "nibble"), layout=2), some, w)


def configs(gpu: Gpu) -> None:
    """Each that supported_configs names."""
    packed, x = pack("trained", N, K, "nibble"), tokens(9, K)
    alone = gpu.call("linear", x, packed, BIAS, layout=2)
    for count in torch.ops.unweight.supported_configs(2):
        y, names = launches(gpu, "_linear_config", x, packed, BIAS, layout=2, tokens=count)
        if count:
            assert names[0] == f"linear_nibble_{count}", names
            assert count > 64 or same(y, alone)
            close(y, x, W, BIAS)
        else:
            assert names[-1] == "poison" and same(y, F.linear(x, W, BIAS))
    every = "[0, 8, 16, 32, 64, 128, 256], as supported_configs"
    refused(gpu, f"tokens: 9, expected one of {every}", "_linear_config", x, packed, tokens=9)
    refused(gpu, "tokens: 8, expected one of [0], as", "_linear_config", x, packed, layout=3, tokens=8)
    refused(gpu, "x: dtype torch.float32, expected torch.bfloat16", "_linear_config", x.float(), packed, tokens=8)
    assert gpu.call("_linear_config", x[:0], packed, tokens=8).shape == (0, N)


def choice(gpu: Gpu) -> None:
    """Who calls the operator gets what the model of costs says, or what was measured."""
    packed, x = pack("trained", N, K, "nibble"), tokens(80, K)

    def kernel(m: int) -> str:
        return launches(gpu, "linear", x[:m], packed, layout=2)[1][0]

    assert [kernel(m) for m in (1, 9, 33, 65)] == [f"linear_nibble_{c}" for c in (8, 16, 64, 128)]
    torch.ops.unweight._set_tuned("Simulated GPU", [2, N, K, 128, 0])
    assert kernel(65) == "verify_header" and kernel(9) == "linear_nibble_16"
    torch.ops.unweight._set_tuned("Simulated GPU", [])
    assert kernel(65) == "linear_nibble_128"


def invariance(gpu: Gpu) -> None:
    packed, x = pack("trained", N, K, "nibble"), tokens(67, K)
    alone = gpu.call("linear", x[66], packed, BIAS, layout=2), gpu.call("linear", x[:1], packed, BIAS, layout=2)
    torch.ops.unweight._batch_invariant(1)
    y, names = launches(gpu, "linear", x, packed, BIAS, layout=2)
    assert [name for name in names if name.startswith("linear")] == ["linear_nibble_64", "linear_nibble_8"]
    close(y, x, W, BIAS)
    assert same(y[66], alone[0]) and same(y[:1], alone[1])
    several = [torch.ops.unweight._pack(w, 2, list(w.shape), 0) for w in SEVERAL[:2]]
    many = gpu.call("linear_many", x, several, [None, None])
    few = gpu.call("linear_many", x[64:], several, [None, None])
    assert all(same(a[64:], b) for a, b in zip(many, few, strict=True))
    offs = torch.tensor([67], dtype=torch.int32)
    refused(gpu, "x: 67 rows, under batch_invariant(True) grouped", "grouped_linear", x, packed[None], offs)
    grouped = gpu.call("grouped_linear", x[:1], packed[None].clone(), offs.clamp(max=1), BIAS[None], layout=2)
    assert same(grouped, alone[1])
    torch.ops.unweight._batch_invariant(0)


def several(gpu: Gpu) -> None:
    """linear_many: one launch where one can do it."""
    x = tokens(5, K)
    packed = [torch.ops.unweight._pack(w, 2, list(w.shape), 0) for w in SEVERAL]
    bias = [None, tokens(65, seed=3), None]

    def call(p: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
        return gpu.call("linear_many", x, p, bias, **options)

    _, names = launches(gpu, "linear_many", x, packed, bias, layouts=[2, 2, 2])
    assert names == ["linear_nibble_8"]
    for options in ({"layouts": [2, 2, 2]}, {}, {"out_dtype": torch.float32, "layouts": [2, 2, 2]}):
        for y, w, b in zip(call(packed, **options), SEVERAL, bias, strict=True):
            assert y.dtype == options.get("out_dtype", torch.bfloat16)
            close(y, x, w, b)
    mixed = [torch.ops.unweight._pack(w, i, list(w.shape), 0) for i, w in enumerate(SEVERAL)]
    assert launches(gpu, "linear_many", x, mixed, bias, layouts=[0, 1, 2])[1][0] == "linear_any_8"
    for y, w, b in zip(call(mixed, layouts=[0, 1, 2]), SEVERAL, bias, strict=True):
        close(y, x, w, b)
    archive = [mixed[0], torch.ops.unweight._pack(SEVERAL[1], 3, [65, K], 0), mixed[2]]
    for y, w, b in zip(call(archive, layouts=[0, 3, 2]), SEVERAL, bias, strict=True):
        assert same(y, F.linear(x, w, b))
    six = gpu.call("linear_many", x, packed * 2, [None] * 6, layouts=[2] * 6)  # more than one launch takes
    for y, w in zip(six, SEVERAL * 2, strict=True):
        close(y, x, w)
    assert [y.shape for y in gpu.call("linear_many", x[:0], packed, bias)] == [(0, 64), (0, 65), (0, 128)]
    assert gpu.call("linear_many", x, [], []) == []
    refused(gpu, "bias: 1 of them, expected 2", "linear_many", x, packed[:2], [None])
    try:
        gpu.call("linear_many", x, [packed[0], W], [None, None])
    except RuntimeError as error:
        assert str(error) == "packed_w: dtype torch.bfloat16, expected torch.uint8 (weight 1 of the list)", error
    else:
        raise AssertionError("linear_many takes a weight that isn't packed")


def experts(gpu: Gpu) -> None:
    w = torch.stack([weight("trained", 65, K, seed) for seed in range(3)])
    packed, x, bias = torch.ops.unweight._pack(w, 2, [65, K], 0), tokens(9, K), tokens(3, 65, seed=2)

    def call(*ends: int, **options: object) -> torch.Tensor:
        return gpu.call("grouped_linear", x, packed, torch.tensor(ends, dtype=torch.int32), bias, **options)

    for ends in ((2, 2, 7), (0, 0, 9), (0, 0, 0), (9, 9, 9)):
        for options in ({"layout": 2}, {}, {"exact": True}, {"layout": 2, "out_dtype": torch.float32}):
            y = call(*ends, **options)
            assert y.dtype == options.get("out_dtype", torch.bfloat16)
            for e, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                if begin < end:
                    close(y[begin:end], x[begin:end], w[e], bias[e])
                if begin < end and "exact" in options:
                    assert same(y[begin:end], F.linear(x[begin:end], w[e], bias[e]))
            assert not y[ends[-1] :].any()
    # Ends that can't be are cut to what can.
    close(call(4, 2, 100)[4:], x[4:], w[2], bias[2])
    close(call(-5, 3, 9)[:3], x[:3], w[1], bias[1])
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    _, names = launches(gpu, "grouped_linear", x, packed, offs, layout=2)
    assert names == ["linear_nibble_8"]
    assert gpu.call("grouped_linear", x[:0], packed, offs).shape == (0, 65)
    assert not gpu.call("grouped_linear", x, packed[:0], offs[:0]).any()
    exact = gpu.call("grouped_linear", x.float(), packed, offs, bias.float(), exact=True)
    assert same(exact[2:7], F.linear(x[2:7].float(), w[2].float(), bias[2].float()))
    name = "grouped_linear"
    refused(gpu, "x: dtype torch.float32, expected torch.bfloat16 on a GPU; exact", name, x.float(), packed, offs)
    refused(gpu, "layout: archive, expected raw, huffman or nibble", name, x, packed, offs, layout=3)
    refused(gpu, "offs: shape [2], expected [3]", name, x, packed, offs[:2])
    refused(
        gpu, "offs: element 2 is 10, expected 2 to 9", name, x, packed, offs + torch.tensor([0, 0, 3]).int(), exact=True
    )
    refused(gpu, "bias: shape [65], expected [3, 65]", name, x, packed, offs, bias[0])
    refused(gpu, "packed_w: 2 dimensions, expected 3", name, x, packed[0], offs)


def hints(gpu: Gpu) -> None:
    """next_w: its first stages are asked for, whoever multiplies; results don't change."""
    packed, x, following = pack("trained", N, K, "nibble"), tokens(3, K), pack("trained", 300, 500, "huffman")
    offs = torch.tensor([3], dtype=torch.int32)
    calls = (
        ("linear", (x, packed, BIAS), {"layout": 2}),
        ("linear_many", (x, [packed, packed], [BIAS, None]), {}),
        ("grouped_linear", (x, packed[None].clone(), offs, BIAS[None]), {}),
    )

    def asked(name: str, *arguments: object, **options: object) -> tuple[Any, int]:
        machine = gpu.device.machine
        machine.counters.prefetched.clear()
        result = gpu.call(name, *arguments, **options)
        return result, sum(size for _, _, size in machine.counters.prefetched)

    for name, arguments, options in calls:
        plain, before = asked(name, *arguments, **options)
        hinted, after = asked(name, *arguments, following, **options)
        assert after > before + 4 * 64 * 128, (name, before, after)
        pairs = zip(hinted, plain, strict=True) if name == "linear_many" else [(hinted, plain)]
        assert all(same(a, b) for a, b in pairs)
    # A view that starts at an odd address can't be prefetched from, and is no error.
    odd = torch.zeros(following.numel() + 16, dtype=torch.uint8)[1:][: following.numel()].view(following.shape)
    assert asked("linear", x, packed, BIAS, odd)[1] == asked("linear", x, packed, BIAS)[1]
    refused(gpu, "next_w: dtype torch.bfloat16, expected torch.uint8", "linear", x, packed, BIAS, W)
    refused(gpu, "next_w: shape [1, 300, ", "linear_many", x, [packed], [None], following[None])
    refused(gpu, "next_w: is not contiguous", "grouped_linear", x, packed[None].clone(), offs, None, following.t())


def captured(gpu: Gpu) -> None:
    """No product waits for the device, but that of experts with exact=True."""
    packed, x = pack("trained", N, K, "nibble"), tokens(3, K)
    offs = torch.tensor([3], dtype=torch.int32)
    gpu.captured = True
    for options in ({}, {"layout": 2}, {"exact": True}):
        close(gpu.call("linear", x, packed, **options), x)
    close(gpu.call("linear_many", x, [packed], [None])[0], x)
    close(gpu.call("grouped_linear", x, packed[None].clone(), offs), x)
    message = "packed_w: unpack waits for the GPU, which a stream that is being captured"
    refused(gpu, message, "grouped_linear", x, packed[None].clone(), offs, exact=True)


CASES = (linear, scratch, rows, configs, choice, invariance, several, experts, hints, captured)
