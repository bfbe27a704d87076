// Small kernels that are right, and the same kernels with one bug each: what the interpreter must be silent about, and
// what it must report. The line of a bug's report ends in `// reported: <name>`.
#pragma once
#include <cstdint>

#include "cuda/ptx.cuh"

namespace ptx = unweight::ptx;

struct Arguments {
  uint64_t input, output, scratch;  // device addresses
  uint32_t count;
};

template <class T>
__device__ T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// The kernels <name>_clean and <name>_bug of a template <bool kBug>.
#define SEEDED(name)                                                                               \
  extern "C" __global__ void name##_clean(const __grid_constant__ Arguments a) { name<false>(a); } \
  extern "C" __global__ void name##_bug(const __grid_constant__ Arguments a) { name<true>(a); }

// The same with launch bounds: setmaxnreg needs to know how many registers a thread starts with.
#define SEEDED_BOUNDED(name, threads)                                                                          \
  extern "C" __global__ void __launch_bounds__(threads, 1) name##_clean(const __grid_constant__ Arguments a) { \
    name<false>(a);                                                                                            \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(threads, 1) name##_bug(const __grid_constant__ Arguments a) {   \
    name<true>(a);                                                                                             \
  }

// Instructions that only these kernels need.

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
  }
}

__device__ __forceinline__ void mbarrier_inval(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void load(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store(uint64_t to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_store_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kId>
__device__ __forceinline__ void named_barrier(uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen;
}

__device__ __forceinline__ uint32_t load_matrix(uint32_t row) {
  uint32_t value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(value) : "r"(row) : "memory");
  return value;
}

__device__ __forceinline__ void store_matrix(uint32_t row, uint32_t value) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(value) : "memory");
}

// value + 1 through a register that only lanes with value < limit have written.
__device__ __forceinline__ uint32_t one_more(uint32_t value, uint32_t limit) {
  uint32_t result;
  asm volatile("{\n.reg .pred p;\n.reg .b32 r;\nsetp.lt.u32 p, %1, %2;\n@p mov.b32 r, %1;\nadd.u32 %0, r, 1;\n}"
               : "=r"(result)
               : "r"(value), "r"(limit));
  return result;
}

// --- wgmma: m64n16k16, BF16, FP32 sums

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewest>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// A tile with rows of 64 elements and the 128-byte swizzle, 8 rows in 1024 bytes.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void pin(float (&d)[8]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

__device__ __forceinline__ void multiply(float (&d)[8], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)));
}

__device__ __forceinline__ void multiply(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(add)));
}

__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
