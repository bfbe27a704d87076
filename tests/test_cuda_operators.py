"""The operators for CUDA tensors, as far as that shows without a GPU. What the kernels do: tests/test_cuda_*.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import unweight_ext as u
from unweight_ext import convert, ops

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import native_build
from cuda_toolkit import find_program

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
WEIGHT = weight("trained", 64, 128)
PACKED = u.pack(WEIGHT)
X = torch.randn(2, 128)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the kernels run")


@pytest.mark.parametrize(
    "name, arguments, culprit",
    [
        ("linear", (X, PACKED), "packed_w"),
        ("grouped_linear", (X, PACKED[None], torch.tensor([2], dtype=torch.int32)), "packed_w"),
        ("linear_many", (X, [PACKED], [None]), "packed_w"),
        ("unpack", (PACKED, 128, torch.bfloat16), "packed_w"),
        ("_unpack", (PACKED, 128, 0), "packed_w"),
        ("embedding", (torch.tensor([0]), PACKED, 128), "packed_w"),
        ("_pack", (WEIGHT, 2, [64, 128], 0), "weight"),
        ("_transcode", (PACKED, 1, 0), "packed_w"),
        ("_transcode", (PACKED, 3, 0), "packed_w"),
        ("_resize", (PACKED, 1024), "packed_w"),
        ("_verify", (PACKED,), "packed_w"),
        ("_describe", (PACKED,), "packed_w"),
    ],
)
def test_cuda_operators_check_where_tensors_are(name: str, arguments: tuple, culprit: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{culprit}: is not on a CUDA device, expected it there"):
        getattr(torch.ops.unweight, name).default.redispatch(CUDA, *arguments)


def test_arguments_are_checked_before_the_gpu_is_asked() -> None:
    with pytest.raises(RuntimeError, match="^dtype: torch.float16, expected torch.bfloat16"):
        ops.unpack.redispatch(CUDA, PACKED, 128, torch.float16)
    with pytest.raises(RuntimeError, match="^layout: 4, expected 0"):
        torch.ops.unweight._transcode.default.redispatch(CUDA, PACKED, 4, 0)


@NO_GPU
def test_without_a_gpu_the_reason_is_said() -> None:
    problem = ops.cuda_problem(torch.device("cuda", 0))
    assert problem is not None
    # A driver without a GPU says something else than none at all.
    assert problem.startswith(("CUDA: no NVIDIA driver is installed, expected one for a GPU", "CUDA: the"))


@NO_GPU
def test_models_on_a_gpu_without_kernels_are_left_alone() -> None:
    reason = convert._device_reason(torch.device("cuda", 0), nn.Linear, exact=True)
    assert reason == f"on cuda:0: {ops.cuda_problem(torch.device('cuda', 0))}"


def test_other_devices_are_left_alone() -> None:
    assert convert._device_reason(torch.device("cpu"), nn.Linear, exact=False) is None
    assert convert._device_reason(torch.device("xpu", 1), nn.Linear, exact=True) == (
        "on xpu:1: there are kernels for CPUs and CUDA devices"
    )


def test_products_on_a_gpu_without_the_fused_kernel_need_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cuda_problem", lambda device: None)
    monkeypatch.setattr(convert, "fused_problem", lambda device: "device: cuda:0 has compute capability 8.0")
    device = torch.device("cuda", 0)
    assert convert._device_reason(device, nn.Linear, exact=False) == (
        "on cuda:0: device: cuda:0 has compute capability 8.0"
    )
    assert convert._device_reason(device, nn.Linear, exact=True) is None
    assert convert._device_reason(device, nn.Embedding, exact=False) is None
    monkeypatch.setattr(convert, "fused_problem", lambda device: None)  # a Hopper GPU
    assert convert._device_reason(device, nn.Linear, exact=False) is None


def test_results_are_on_the_gpu_but_for_the_description() -> None:
    with FakeTensorMode():
        packed = torch.empty(64, 1024, dtype=torch.uint8, device="cuda")
        x = torch.empty(3, 700, dtype=torch.bfloat16, device="cuda")
        ids = torch.empty(2, 5, dtype=torch.int64, device="cuda")
        results = {
            "unpack": ops.unpack(packed, 700, torch.bfloat16),
            "linear": ops.linear(x, packed, exact=True),
            "embedding": ops.embedding(ids, packed, 700),
            "resize": torch.ops.unweight._resize(packed, 1040),
        }
        description = torch.ops.unweight._describe(packed)
    assert {name: (tuple(t.shape), t.device.type) for name, t in results.items()} == {
        "unpack": ((64, 700), "cuda"),
        "linear": ((3, 64), "cuda"),
        "embedding": ((2, 5, 700), "cuda"),
        "resize": ((64, 1040), "cuda"),
    }
    assert description.device.type == "cpu"


def test_products_under_autocast_are_ours_on_both_devices() -> None:
    for key in ("AutocastCPU", "AutocastCUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("unweight::linear", key)


def test_the_library_holds_code_for_hopper() -> None:
    """Of each .cu file. (Fails for a build without nvcc: `./run tests` builds with one.)"""
    import unweight_ext._C

    listed = subprocess.run([find_program("cuobjdump"), "--list-elf", unweight_ext._C.__file__], capture_output=True)
    assert listed.stdout.decode().count(".sm_90a.cubin") == len(native_build.cuda_sources()), listed


@pytest.mark.slow
def test_a_build_without_cuda_says_what_to_install(tmp_path: Path) -> None:
    """The same operators are there, and those for CUDA say why they can't run."""
    library = tmp_path / "_C.abi3.so"
    code = f"import sys; sys.path.insert(0, {str(native_build.ROOT / 'tools')!r}); import native_build\n"
    code += f"from pathlib import Path; native_build.build_extension(Path({str(library)!r}))"
    env = {**os.environ, "UNWEIGHT_CUDA": "0"}
    built = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert built.returncode == 0 and "UNWEIGHT_CUDA=0: building without CUDA kernels" in built.stdout, built
    code = f"import torch; torch.ops.load_library({str(library)!r}); torch.ops.unweight._check_cuda(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = "RuntimeError: CUDA: this build of unweight-ext has no CUDA kernels: install nvcc 12.4 or newer"
    assert message in done.stderr, done.stderr
