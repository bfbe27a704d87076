// Rows of archives: a warp an id, which decodes the row's chunk from its start to the row's end. Archives are for
// disks; this is so that every layout can be looked up, not to be fast.
//
// expects: UBLKCP
// hot loop: unweight_embedding_archive 8 VOTE
// budget: unweight_embedding_archive 26.0
#include "archive.cuh"
#include "embedding_shared.h"
#include "ids.cuh"

namespace unweight::cuda {
namespace {

// Weights [begin, end) of a chunk to out.
static __device__ void decode_row(const Matrix& m, const Chunk& c, uint32_t shared, uint32_t lane, uint64_t begin,
                                  uint64_t end, uint16_t* out) {
  ArchiveWarp warp(m, c, shared, lane);
#pragma unroll 1
  for (uint64_t first = 0; first < end; first += 2 * kRoundPairs) {
    if (warp.group_starts()) warp.prepare();
    uint32_t entries[4];
    warp.decode(entries);
    if (first + 2 * kRoundPairs <= begin) continue;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const uint64_t at = first + 2 * (kLanes * i + lane);
      if (at >= end || at + 1 < begin) continue;
      const uint32_t weights = warp.signs(kLanes * i) | (entries[i] & kExponentBits);
      if (at >= begin) out[at - begin] = static_cast<uint16_t>(weights);
      if (at + 1 < end) out[at + 1 - begin] = static_cast<uint16_t>(weights >> 16);
    }
  }
  warp.finish();
}

// As in a whole chunk: patches ascend, or none is applied. False then.
static __device__ bool patch_row(const Matrix& m, const Chunk& c, uint32_t lane, uint64_t begin, uint64_t end,
                                 uint16_t* out) {
  if (!__all_sync(0xFFFFFFFFu, patches_ascend_part(m, c, lane, kLanes))) return false;
  const auto* positions = reinterpret_cast<const uint32_t*>(m.bytes + c.positions);
  for (uint32_t i = lane; i < c.patches; i += kLanes) {
    const uint64_t at = 2 * uint64_t{positions[i]};
    if (at >= end || at + 1 < begin) continue;
    const uint32_t weights = patched_pair(m, c, i);
    if (at >= begin) out[at - begin] = static_cast<uint16_t>(weights);
    if (at + 1 < end) out[at + 1 - begin] = static_cast<uint16_t>(weights >> 16);
  }
  return true;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kArchiveEmbeddingThreads)
    unweight_embedding_archive(const __grid_constant__ EmbeddingArgument a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t shared = ptx::pinned(ptx::shared_address(memory)), lane = threadIdx.x;
  const uint64_t columns = a.packed.in_features, id = row_id(a, blockIdx.x);
  auto* out = reinterpret_cast<uint16_t*>(a.out) + blockIdx.x * columns;
  Matrix m;
  Flaw flaw = open_matrix(a.packed, 0, m);
  uint64_t place = flaw_place(flaw, m);
  if (flaw == Flaw::kNone) {
    if (m.layout != Layout::kArchive) return;  // unweight_embedding_tiles does it
    if (id >= a.packed.out_features) {
      flaw = Flaw::kId;
      place = blockIdx.x;
    } else {
      place = id / a.packed.chunk_rows;
      const Chunk chunk = open_chunk(a.packed, m, static_cast<uint32_t>(place));
      if (!chunk.good) {
        flaw = Flaw::kChunk;
      } else {
        const uint64_t begin = id % a.packed.chunk_rows * columns, end = begin + columns;
        if (lane == 0) init_archive_barriers(shared);
        fill_table(m.bytes, kMaxCodeBits, shared + kArchiveTableOffset, lane, kLanes);
        decode_row(m, chunk, shared, lane, begin, end, out);
        __syncwarp();  // patches come after what they replace, and so does NaN
        if (!patch_row(m, chunk, lane, begin, end, out)) flaw = Flaw::kChunkPatch;
      }
    }
  }
  if (flaw == Flaw::kNone) return;
  if (lane == 0) report(a.status, flaw, 0, place);
  fill_row_with_nan(out, columns, lane, kLanes);
}

}  // namespace unweight::cuda
