// One PTX instruction per function. Shared memory is addressed by 32-bit numbers.
#pragma once
#include <cstdint>

namespace unweight::ptx {

#define UNWEIGHT_PTX static __device__ __forceinline__

UNWEIGHT_PTX uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// No instruction: keeps the compiler from making a value anew in each round of a loop, and what follows from it where
// it isn't needed yet.
UNWEIGHT_PTX uint32_t pinned(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same value, which ptxas can't make anew. All lanes call it.
UNWEIGHT_PTX uint32_t opaque(uint32_t value) {
  asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, 0xffffffff;" : "+r"(value));
  return value;
}

// A value that is the same in all lanes, so that ptxas knows it. What decides a branch and isn't known to be so (all
// that was loaded from addresses that aren't arguments) costs every later branch, vote and wgmma a repair. All lanes
// call it.
UNWEIGHT_PTX uint32_t uniform(uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// Marks what is seldom done, for the compiler's schedule and for who counts a hot loop's instructions (tools/sass.py).
UNWEIGHT_PTX void rare() { asm volatile("nanosleep.u32 0;" ::: "memory"); }

UNWEIGHT_PTX uint32_t lanes_before() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// Lanes whose value isn't 0. All lanes call it. (The intrinsic makes a bool of the value first: three instructions.)
UNWEIGHT_PTX uint32_t ballot(uint32_t value) {
  uint32_t lanes;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.ballot.b32 %0, p, 0xffffffff;\n}"
               : "=r"(lanes)
               : "r"(value));
  return lanes;
}

// --- mbarriers

UNWEIGHT_PTX void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to bulk copies. (Before Hopper there are none.)
UNWEIGHT_PTX void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

UNWEIGHT_PTX void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

UNWEIGHT_PTX void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Before Hopper it doesn't wait a while, but looks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define UNWEIGHT_TRY_WAIT "mbarrier.test_wait"
#else
#define UNWEIGHT_TRY_WAIT "mbarrier.try_wait"
#endif
UNWEIGHT_PTX bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\n" UNWEIGHT_TRY_WAIT ".parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// --- bulk copies

// For bytes that are read once: they are the first to leave the L2.
UNWEIGHT_PTX uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Addresses and size are multiples of 16. The barrier's current phase gets the bytes.
UNWEIGHT_PTX void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// --- shared memory

UNWEIGHT_PTX uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

UNWEIGHT_PTX uint32_t load_shared_half(uint32_t address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}

UNWEIGHT_PTX uint2 load_shared_pair(uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
  return words;
}

UNWEIGHT_PTX uint4 load_shared_quad(uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

UNWEIGHT_PTX void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

UNWEIGHT_PTX void store_shared_quad(uint32_t address, uint4 words) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// Lane l gives the address of row l % 8 of matrix l / 8; register i of all lanes is matrix i.
UNWEIGHT_PTX void store_matrices(uint32_t row, const uint32_t (&registers)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(registers[0]),
               "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
}

// --- global memory

// Packed bytes: read once, never written while a kernel runs.
UNWEIGHT_PTX uint4 load_once(const void* address) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(__cvta_generic_to_global(address)));
  return words;
}

// All that this thread wrote, or knows to be written, is there for who acquires the value.
UNWEIGHT_PTX void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

UNWEIGHT_PTX void store_relaxed(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

UNWEIGHT_PTX uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

// From here on the launch behind this one may start.
UNWEIGHT_PTX void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the launches before this one have ended, and what they wrote is there.
UNWEIGHT_PTX void wait_for_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Reads a word of global memory, so that its line is in the L1. ptxas leaves out what nobody uses: the pause is of no
// length, and nearly never made.
UNWEIGHT_PTX void touch(const void* from) {
  asm volatile(
      "{\n.reg .b32 t;\n.reg .pred p;\nld.global.u32 t, [%0];\nsetp.eq.u32 p, t, 0xFFFFFFFF;\n@p nanosleep.u32 0;\n}" ::
          "l"(__cvta_generic_to_global(from))
      : "memory");
}

// Into the L2, nowhere else. Address and size are multiples of 16.
UNWEIGHT_PTX void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// --- copies of 16 bytes: the first `bytes` of them from there, zeros behind them

UNWEIGHT_PTX void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

// When all that this thread has copied so far is there.
UNWEIGHT_PTX void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

UNWEIGHT_PTX void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kNewest>
UNWEIGHT_PTX void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

// What this thread wrote to shared memory may be read by tensor cores and bulk copies.
UNWEIGHT_PTX void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- threads

// `threads` of the CTA meet, whole warps.
template <int kId>
UNWEIGHT_PTX void named_barrier(uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

// Registers of each thread of a warpgroup from here on.
template <int kRegisters>
UNWEIGHT_PTX void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
UNWEIGHT_PTX void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- numbers

// Two floats as BF16, rounded to nearest even; the first in the low half.
UNWEIGHT_PTX uint32_t to_bfloat16(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

}  // namespace unweight::ptx
