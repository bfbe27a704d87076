// docs/FORMAT.md section 5: where a weight lives in a stage. constexpr, for host and device.
#pragma once
#include <cstdint>

// Forced inlining, also because these headers are compiled with different instruction sets: an out-of-line copy built
// for AVX-512 must never be the one the linker keeps for everybody.
#ifdef __CUDACC__
#define UNWEIGHT_HD static __host__ __device__ __forceinline__
#define UNWEIGHT_HD_MEMBER __host__ __device__ __forceinline__
#else
#define UNWEIGHT_HD static inline __attribute__((always_inline))
#define UNWEIGHT_HD_MEMBER inline __attribute__((always_inline))
#endif

namespace unweight {

constexpr int kBlockRows = 64;      // rows of a stage: M of one wgmma
constexpr int kStageColumns = 128;  // columns of a stage
constexpr int kWarps = 4;           // warps of a warpgroup, 16 rows each
constexpr int kWarpRows = 16;
constexpr int kLanes = 32;
constexpr int kRegisters = 4;      // A registers of a lane and k-step, two weights each
constexpr int kKSteps = 8;         // k-steps of a stage
constexpr int kKStepColumns = 16;  // K of one wgmma

constexpr int kStageHeaderBytes = 16;
constexpr int kWarpPlaneBytes = kKSteps * kLanes * 8;              // sign+mantissa bytes of one warp's stage
constexpr int kPlaneBytes = kWarps * kWarpPlaneBytes;              // S-plane
constexpr int kWarpNibbleBytes = kKSteps * kLanes * 4;             // 4-bit codes of one warp's stage
constexpr int kHuffmanSections = kStageHeaderBytes + kPlaneBytes;  // first byte after the fixed part
constexpr int kNibbleSections = kHuffmanSections + kWarps * kWarpNibbleBytes;
constexpr int kWarpRawBytes = kKSteps * kLanes * 16;
constexpr int kRawStageBytes = kStageHeaderBytes + kWarps * kWarpRawBytes;
constexpr int kMaxWarpPatches = 128;
// One word at most a lane and k-step, and four words a lane when a segment starts.
constexpr int kMaxWarpWords = kLanes * (kKSteps + 4);

static_assert(kRawStageBytes % 16 == 0 && kNibbleSections % 16 == 0, "stages are moved by 16-byte bulk copies");
static_assert(kHuffmanSections + 4 * kWarps * (kMaxWarpPatches + kMaxWarpWords) <= kRawStageBytes + 1024,
              "a ring slot of the raw size, rounded to 1 KB, takes every stage");

UNWEIGHT_HD constexpr int fragment_row(int warp, int lane, int reg) {
  return kWarpRows * warp + lane / 4 + 8 * (reg & 1);
}
UNWEIGHT_HD constexpr int fragment_column(int kstep, int lane, int reg) {
  return kKStepColumns * kstep + 2 * (lane % 4) + 8 * (reg >> 1);
}

// One u32 a warp at the start of a stage.
struct WarpHeader {
  uint32_t bits;
  UNWEIGHT_HD_MEMBER constexpr uint32_t section() const { return 4 * (bits & 0x1FFF); }  // bytes from the stage's start
  UNWEIGHT_HD_MEMBER constexpr bool has_zero_rows() const { return bits >> 13 & 1; }
  UNWEIGHT_HD_MEMBER constexpr bool is_raw() const { return bits >> 14 & 1; }
  UNWEIGHT_HD_MEMBER constexpr uint32_t patched_ksteps() const { return bits >> 16 & 0xFF; }
  UNWEIGHT_HD_MEMBER constexpr uint32_t patches() const { return bits >> 24; }
};

constexpr uint32_t kRawWarpHeader = 1u << 14;

UNWEIGHT_HD constexpr uint32_t make_warp_header(uint32_t section_bytes, bool zero_rows, uint32_t patched_ksteps,
                                                uint32_t patches) {
  return section_bytes / 4 | uint32_t{zero_rows} << 13 | patched_ksteps << 16 | patches << 24;
}

// A patch replaces both exponents of one register; its exponent bits already are where a register has them.
constexpr uint32_t kExponentBits = 0x7F807F80u;
constexpr uint32_t kPatchContinues = 1u << 31;
UNWEIGHT_HD constexpr uint32_t patch_place(uint32_t patch) { return patch & 0x7F; }  // 4 * lane + register

}  // namespace unweight
