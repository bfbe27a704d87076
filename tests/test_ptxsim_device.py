"""The simulated device: its memory, and kernels compiled by nvcc from a folder of sources."""

import gc
import weakref

import numpy as np
import pytest
import torch
from linear_product import Product, Weight, config, packed, tokens
from ptxsim import KernelReport, Kind, sparse
from ptxsim.compiler import ROOT, CompileError, compile_ptx, find_kernel
from ptxsim.device import SimulatedDevice

SOURCE = """
#include "sizes.h"
#include <cassert>
#include <cstdint>
#include <cstdio>
struct Argument { const uint32_t* in; uint32_t* out; uint32_t* last; uint32_t n; };

__device__ __forceinline__ uint32_t scaled(uint32_t x) {
  asm volatile("mul.lo.u32 %0, %0, %1;" : "+r"(x) : "n"(kScale));
  return x;
}

// Adds up n words: each CTA a part, the last one the parts.
extern "C" __global__ void __launch_bounds__(kThreads) sum(const __grid_constant__ Argument a) {
  __shared__ uint32_t parts[kThreads];
  __shared__ uint32_t ticket;
  const uint32_t t = threadIdx.x;
  uint32_t mine = 0;
  for (uint32_t i = blockIdx.x * kThreads + t; i < a.n; i += gridDim.x * kThreads) mine += scaled(a.in[i]);
  parts[t] = mine;
  for (uint32_t half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (t < half) parts[t] += parts[t + half];
  }
  if (t == 0) {
    a.out[1 + blockIdx.x] = parts[0];
    __threadfence();
    ticket = atomicAdd(a.last, 1);
    __threadfence();
  }
  __syncthreads();
  if (ticket == gridDim.x - 1 && t == 0) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < gridDim.x; i++) total += a.out[1 + i];
    a.out[0] = total;
  }
}

extern "C" __global__ void talks(const __grid_constant__ Argument a) {
  if (threadIdx.x == 3) printf("%u\\n", a.n);
  assert(a.n != 7);
  a.out[threadIdx.x] = a.in[threadIdx.x];
}

#define NAMED(what) unweight_##what
extern "C" __global__ void NAMED(by_macro)(const __grid_constant__ Argument a) {
  switch (a.in[threadIdx.x]) {
    case 0: a.out[threadIdx.x] = 5; break;
    case 1: a.out[threadIdx.x] = a.n; break;
    case 2: a.out[threadIdx.x] = 77; break;
    case 3: a.out[threadIdx.x] = a.n ^ 5; break;
    case 4: a.out[threadIdx.x] = a.n * a.n; break;
    default: a.out[threadIdx.x] = 0;
  }
}
"""


@pytest.fixture(scope="module")
def csrc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "cuda").mkdir()
    (folder / "cuda" / "sum.cu").write_text(SOURCE)
    (folder / "cuda" / "sizes.h").write_text("constexpr int kThreads = 128, kScale = 3;")
    return folder


def sum_on(device: SimulatedDevice, x: np.ndarray, grid: int) -> int:
    argument = np.array(
        [
            device.tensor(x, "x"),
            out := device.allocate(4 * (grid + 1), "out"),
            device.tensor(np.zeros(1, np.uint32), "last", readonly=False),
            x.size,
        ],
        np.uint64,
    )
    device.launch("sum", grid, 128, 0, argument.tobytes())
    return int(device.read(out, np.uint32, ()))


@pytest.mark.parametrize(("n", "grid"), [(1, 1), (1000, 3), (5000, 20)])
def test_a_compiled_kernel(csrc, n, grid):
    x = np.random.default_rng(n).integers(0, 1 << 20, n, np.uint32)
    for seed in range(3):
        device = SimulatedDevice(seed=seed, csrc=csrc)
        assert sum_on(device, x, grid) == 3 * int(x.sum()) % (1 << 32)
        assert device.launched == ["sum"]


def test_what_is_compiled_is_what_the_headers_say(csrc, tmp_path):
    changed = tmp_path / "csrc"
    (changed / "cuda").mkdir(parents=True)
    (changed / "cuda" / "sum.cu").write_text(SOURCE)
    (changed / "cuda" / "sizes.h").write_text("constexpr int kThreads = 128, kScale = 10;")
    assert sum_on(SimulatedDevice(csrc=changed), np.arange(10, dtype=np.uint32), 1) == 450
    assert sum_on(SimulatedDevice(csrc=csrc), np.arange(10, dtype=np.uint32), 1) == 135
    assert compile_ptx(csrc / "cuda" / "sum.cu", headers=csrc) != compile_ptx(
        changed / "cuda" / "sum.cu", headers=changed
    )


def test_locations_name_the_source_and_the_line_that_called(csrc):
    kernel = find_kernel("sum", csrc)
    inlined = {
        instruction.location.frames for instruction in kernel.instructions if len(instruction.location.frames) > 1
    }
    line = 1 + next(i for i, text in enumerate(SOURCE.split("\n")) if "asm volatile" in text)
    caller = 1 + next(i for i, text in enumerate(SOURCE.split("\n")) if "mine += scaled" in text)
    assert (("sum.cu", line), ("sum.cu", caller)) in inlined


@pytest.mark.parametrize("n", [6, 7])
def test_printf_is_silent_and_assert_is_a_report(csrc, n):
    device = SimulatedDevice(csrc=csrc)
    x = np.arange(32, dtype=np.uint32)
    out = device.allocate(128, "out")
    argument = np.array([device.tensor(x, "x"), out, 0, n], np.uint64).tobytes()
    if n == 7:
        with pytest.raises(KernelReport, match=r"a\.n != 7 at .*sum\.cu:\d+") as error:
            device.launch("talks", 1, 32, 0, argument)
        assert error.value.kinds() == {Kind.ASSERTION}
    else:
        device.launch("talks", 1, 32, 0, argument)
        assert (device.read(out, np.uint32, 32) == x).all()


def test_a_name_made_by_a_macro_and_a_switch(csrc):
    device = SimulatedDevice(csrc=csrc)
    x = np.arange(32, dtype=np.uint32) % 6
    out = device.allocate(128, "out")
    device.launch("unweight_by_macro", 1, 32, 0, np.array([device.tensor(x, "x"), out, 0, 9], np.uint64).tobytes())
    assert device.read(out, np.uint32, 32).tolist() == [[5, 9, 77, 12, 81, 0][i] for i in x]


def test_memory_of_the_device():
    device = SimulatedDevice(multiprocessors=3)
    assert device.multiprocessors() == 3
    where = device.allocate(100, "scratch")
    assert where % 256 == 0
    with pytest.raises(ValueError, match="byte 0 of scratch .* was never written"):
        device.download(where, 1)
    device.clear(where, 60)
    device.upload(where + 60, bytes(range(40)))
    assert device.download(where, 100) == bytes(60) + bytes(range(40))
    assert device.download(where, 0) == b""
    with pytest.raises(ValueError, match=r"2 bytes at .*: out of bounds, byte 99 of scratch \(100 bytes\)"):
        device.upload(where + 99, b"12")
    with pytest.raises(ValueError, match="no tensor"):
        device.download(64, 1)
    weights = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert device.read(device.tensor(weights, "weights"), np.uint16, (2, 3))[1, 0] == 0x4040


def test_memory_is_larger_than_this_machine_s(csrc):
    """What nobody touches costs nothing, be it written to or only read."""
    device = SimulatedDevice(csrc=csrc)
    content = sparse.zeros(1 << 36, np.uint8)
    content[-128:] = np.arange(32, dtype=np.uint32).view(np.uint8)
    x = device.machine.memory.adopt(content, "x").base + content.size - 128
    out = device.allocate(1 << 40, "out")
    device.launch("talks", 1, 32, 0, np.array([x, out + (1 << 40) - 128, 0, 6], np.uint64).tobytes())
    assert (device.read(out + (1 << 40) - 128, np.uint32, 32) == np.arange(32)).all()
    with pytest.raises(ValueError, match=f"byte {(1 << 40) - 129} of out .* was never written"):
        device.download(out + (1 << 40) - 129, 4)
    with pytest.raises(ValueError, match="part: expected contiguous uint8, a multiple of 16"):
        device.machine.memory.adopt(content[:8], "part")


def test_some_ctas_of_a_grid(csrc):
    device = SimulatedDevice(csrc=csrc)
    last, out = device.tensor(np.zeros(1, np.uint32), "last", readonly=False), device.allocate(4 * 6, "out")
    argument = np.array([device.tensor(np.ones(10, np.uint32), "x"), out, last, 10], np.uint64).tobytes()
    device.launch("sum", 5, 128, 0, argument, ctas=[0, 3])
    assert [device.read(out + 4 * (1 + cta), np.uint32, ()) for cta in (0, 3)] == [30, 0]
    assert device.read(last, np.uint32, ()) == 2
    with pytest.raises(ValueError, match="byte 8 of out"):
        device.download(out + 8, 4)


def test_a_machine_is_let_go_with_its_last_user():
    """Without Python's collector, which counts objects, not bytes. The kernel has all kinds of copies and barriers."""
    product = Product([Weight(packed("trained", (70, 200), "nibble"), 200)], tokens(2, 200), config(8))
    product.run()
    machine = weakref.ref(product.device.machine)
    gc.disable()
    try:
        del product
        assert machine() is None
    finally:
        gc.enable()


def test_kernels_that_aren_t_there(csrc, tmp_path):
    with pytest.raises(CompileError, match=r"no kernel nothing for sm_90a in sum\.cu"):
        SimulatedDevice(csrc=csrc).launch("nothing", 1, 32, 0, b"")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "broken.cu").write_text('extern "C" __global__ void broken() { nonsense; }')
    with pytest.raises(CompileError, match="nonsense"):
        find_kernel("broken", tmp_path)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
def test_every_kernel_of_the_project_can_be_interpreted(architecture):
    """No instruction is unknown, no function is called, and none keeps variables in local memory."""
    from ptxsim.compiler import cuda_toolkit, load_module
    from ptxsim.execute import compile_kernel

    names = []
    for source in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")):
        if architecture not in cuda_toolkit.architectures(source):
            continue
        for kernel in load_module(source, headers=ROOT / "csrc", architecture=architecture).kernels.values():
            compile_kernel(kernel)
            assert kernel.local_bytes == 0, kernel.name
            names.append(kernel.name)
    assert names and all(name.startswith("unweight_") for name in names)
