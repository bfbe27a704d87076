// wgmma with A in registers: D[64, kTokens] += A[64, 16] · B[kTokens, 16]ᵀ, BF16 with FP32 sums.
//
// Registers of a wgmma in flight belong to it: between `wgmma_commit` and the `wgmma_wait` that covers it, nobody
// touches its sums, and nobody writes its A registers.
#pragma once
#include "../ptx.cuh"

namespace unweight::ptx {

// Before the first wgmma, and after any other access to its registers.
UNWEIGHT_PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
UNWEIGHT_PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewest>  // groups that may go on
UNWEIGHT_PTX void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// Keeps what writes these before this line, and what reads them behind it.
template <int kCount>
UNWEIGHT_PTX void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// B: K-major, rows of 128 bytes with the 128-byte swizzle, 8 rows in 1024 bytes. A k-step of 16 columns is 32 bytes.
// The low half of its descriptor, which moves by a sixteenth of what the address moves by:
UNWEIGHT_PTX uint32_t wgmma_descriptor_low(uint32_t address) { return address >> 4 | 1 << 16; }
UNWEIGHT_PTX uint64_t wgmma_descriptor(uint32_t low) {
  uint64_t descriptor = low | 64ull << 32 | 1ull << 62;
  asm volatile("" : "+l"(descriptor));  // not made anew for each k-step
  return descriptor;
}
constexpr uint64_t kDescriptorKStep = 32 >> 4;

template <int kTokens>
struct Wgmma;

#define UNWEIGHT_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define UNWEIGHT_SUMS_8(i) UNWEIGHT_SUMS_4(i), UNWEIGHT_SUMS_4(i + 4)
#define UNWEIGHT_SUMS_16(i) UNWEIGHT_SUMS_8(i), UNWEIGHT_SUMS_8(i + 8)
#define UNWEIGHT_SUMS_32(i) UNWEIGHT_SUMS_16(i), UNWEIGHT_SUMS_16(i + 16)
#define UNWEIGHT_SUMS_64(i) UNWEIGHT_SUMS_32(i), UNWEIGHT_SUMS_32(i + 32)
#define UNWEIGHT_SUMS_128(i) UNWEIGHT_SUMS_64(i), UNWEIGHT_SUMS_64(i + 64)
// The names of ten operands, and of those before them.
#define UNWEIGHT_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define UNWEIGHT_30 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " UNWEIGHT_TEN(1) UNWEIGHT_TEN(2)
#define UNWEIGHT_60 UNWEIGHT_30 UNWEIGHT_TEN(3) UNWEIGHT_TEN(4) UNWEIGHT_TEN(5)
#define UNWEIGHT_120 \
  UNWEIGHT_60 UNWEIGHT_TEN(6) UNWEIGHT_TEN(7) UNWEIGHT_TEN(8) UNWEIGHT_TEN(9) UNWEIGHT_TEN(10) UNWEIGHT_TEN(11)

#define UNWEIGHT_WGMMA(tokens, count, sums, a_names, b_name)                                                          \
  template <>                                                                                                         \
  struct Wgmma<tokens> {                                                                                              \
    static __device__ __forceinline__ void multiply(float (&d)[count], const uint32_t (&a)[4], uint64_t b) {          \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 {" sums "}, {" a_names "}, " b_name \
                   ", 1, 1, 1, 0;"                                                                                    \
                   : UNWEIGHT_SUMS_##count(0)                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
    }                                                                                                                 \
  };

UNWEIGHT_WGMMA(8, 4, "%0, %1, %2, %3", "%4, %5, %6, %7", "%8")
UNWEIGHT_WGMMA(16, 8, "%0, %1, %2, %3, %4, %5, %6, %7", "%8, %9, %10, %11", "%12")
UNWEIGHT_WGMMA(32, 16, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16, %17, %18, %19",
               "%20")
UNWEIGHT_WGMMA(64, 32, UNWEIGHT_30 "%30, %31", "%32, %33, %34, %35", "%36")
UNWEIGHT_WGMMA(128, 64, UNWEIGHT_60 "%60, %61, %62, %63", "%64, %65, %66, %67", "%68")
UNWEIGHT_WGMMA(256, 128, UNWEIGHT_120 "%120, %121, %122, %123, %124, %125, %126, %127", "%128, %129, %130, %131",
               "%132")

#undef UNWEIGHT_WGMMA
#undef UNWEIGHT_120
#undef UNWEIGHT_60
#undef UNWEIGHT_30
#undef UNWEIGHT_TEN
#undef UNWEIGHT_SUMS_128
#undef UNWEIGHT_SUMS_64
#undef UNWEIGHT_SUMS_32
#undef UNWEIGHT_SUMS_16
#undef UNWEIGHT_SUMS_8
#undef UNWEIGHT_SUMS_4

}  // namespace unweight::ptx
