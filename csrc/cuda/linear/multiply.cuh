// One consumer warpgroup's work: stages of its block, decoded to A registers and multiplied with the slot's x.
#pragma once
#include "fragments.cuh"
#include "wgmma.cuh"

namespace unweight::cuda {

// kLayout: raw, huffman or nibble. All four warps of a warpgroup call everything together.
//
// sums[i] of lane l of warp w belongs to row 16w + l/4 + 8·((i >> 1) & 1) of the block and to token
// 8·(i >> 2) + 2·(l % 4) + (i & 1). Sums of nibble are scaled by 2^(112 - base).
template <Layout kLayout, int kTokens>
struct StageProduct {
  float (&sums)[kTokens / 2];
  LaneStreams streams;
  uint32_t starts;   // the streams start in the next stage that isn't raw
  uint32_t damaged;  // not 0: a part of the stages couldn't be read, and this warp's 16 rows are worth nothing
  LanePlaces<kLayout> lane;

  // `table` in shared memory, of huffman; warp: 0…3 of the warpgroup.
  __device__ __forceinline__ StageProduct(float (&sums)[kTokens / 2], uint32_t table, uint32_t warp, uint32_t lane)
      : sums(sums), lane(table, warp, lane) {}

  // Before the first stage of a block, or of a CTA's part of one.
  __device__ __forceinline__ void start_chain() {
#pragma unroll
    for (int i = 0; i < kTokens / 2; i++) sums[i] = 0;
    ptx::pin(sums);
    damaged = 0;
    streams = {};
    start_segment();
  }
  // Before the first stage of each segment.
  __device__ __forceinline__ void start_segment() { starts = 1; }

  // Multiplies one stage with the slot's x (`x_low`: wgmma_descriptor_low). `bytes`: a multiple of 16, and not less
  // than kHuffmanSections. Returns with the stage's last products in flight: they read x until the next stage has
  // called `release`, or until `finish`. release(): called once by all lanes, when nothing reads the *previous* stage
  // and its x any more.
  template <class Release>
  __device__ __forceinline__ void stage(uint32_t stage_address, uint32_t bytes, uint32_t x_low, Release release) {
    const uint64_t x = ptx::wgmma_descriptor(x_low);
    Fragments<kLayout> fragments(Stage{stage_address, bytes}, lane, starts, streams);
    Batch a[kBatches];
    batch<0>(fragments, a[0], x);
    release();
    batch<1>(fragments, a[1], x + (kTokens * 128 >> 4));
    damaged |= fragments.damaged();
  }

  // The sums are there.
  __device__ __forceinline__ void finish() {
    ptx::wgmma_wait<0>();
    ptx::pin(sums);
  }

 private:
  template <int kBatch>
  __device__ __forceinline__ void batch(Fragments<kLayout>& fragments, Batch& a, uint64_t x) {
    fragments.decode(kBatch, a);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBatchKSteps; k++) ptx::Wgmma<kTokens>::multiply(sums, a[k], x + ptx::kDescriptorKStep * k);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // the batch before: its A registers are free
  }
};

}  // namespace unweight::cuda
