// Unpacks archives: a CTA a chunk. Its first warp decodes, which takes all the time there is; the others sum the bytes
// up meanwhile. Then all of them set the pairs that have patches.
//
// expects: UBLKCP
// hot loop: unweight_unpack_archive 8 VOTE
// budget: unweight_unpack_archive 14.0
#include "archive.cuh"

namespace unweight::cuda {
namespace {

static __device__ void decode_chunk(const Matrix& m, const Chunk& c, uint32_t shared, uint32_t lane, uint16_t* out) {
  ArchiveWarp warp(m, c, shared, lane);
  const uint64_t pairs = c.weights / 2;
  const uint32_t rounds = static_cast<uint32_t>(pairs / kRoundPairs);  // below 2^26
  auto* to = reinterpret_cast<uint32_t*>(out) + lane;                  // a chunk starts at a multiple of 64 weights
  uint32_t entries[4];
  for (uint32_t left = rounds; left;) {
    warp.prepare();
    const uint32_t group = min(left, kPieceRounds);
    left -= group;
#pragma unroll 1
    for (uint32_t i = 0; i < group; i++, to += kRoundPairs) {
      warp.decode(entries);
      if (!out) continue;
#pragma unroll
      for (uint32_t j = 0; j < 4; j++) __stcs(to + kLanes * j, warp.signs(kLanes * j) | (entries[j] & kExponentBits));
    }
  }
  const uint64_t first = uint64_t{rounds} * 2 * kRoundPairs;
  if (first < c.weights) {
    if (warp.group_starts()) warp.prepare();
    warp.decode(entries);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
      const uint64_t at = first + 2 * (kLanes * j + lane);
      if (!out || at >= c.weights) continue;
      const uint32_t weights = warp.signs(kLanes * j) | (entries[j] & kExponentBits);
      out[at] = static_cast<uint16_t>(weights);
      if (at + 1 < c.weights) out[at + 1] = static_cast<uint16_t>(weights >> 16);
    }
  }
  warp.finish();
}

static __device__ void apply_patches(const Matrix& m, const Chunk& c, uint16_t* out) {
  const auto* positions = reinterpret_cast<const uint32_t*>(m.bytes + c.positions);
  for (uint32_t i = threadIdx.x; i < c.patches; i += kArchiveThreads) {
    const uint64_t at = 2 * uint64_t{positions[i]};
    const uint32_t weights = patched_pair(m, c, i);
    out[at] = static_cast<uint16_t>(weights);
    if (at + 1 < c.weights) out[at + 1] = static_cast<uint16_t>(weights >> 16);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kArchiveThreads)
    unweight_unpack_archive(const __grid_constant__ UnpackArgument a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t shared = ptx::pinned(ptx::shared_address(memory)), warp = threadIdx.x / kLanes,
                 lane = threadIdx.x % kLanes;
  const uint32_t chunks = static_cast<uint32_t>((a.rows + a.packed.chunk_rows - 1) / a.packed.chunk_rows);
  const uint32_t matrix = blockIdx.x / chunks, chunk_in_rows = blockIdx.x % chunks;
  Matrix m;
  const Flaw flaw = open_matrix(a.packed, matrix, m);
  if (flaw != Flaw::kNone) {
    if (threadIdx.x == 0) report(a.status, flaw, matrix, flaw_place(flaw, m));
    return;
  }
  if (m.layout != Layout::kArchive) return;  // unweight_unpack_tiles does it
  const uint32_t number = static_cast<uint32_t>(a.first_row / a.packed.chunk_rows) + chunk_in_rows;
  const Chunk chunk = open_chunk(a.packed, m, number);
  if (!chunk.good) {
    if (threadIdx.x == 0) report(a.status, Flaw::kChunk, matrix, number);
    return;
  }
  uint16_t* out = nullptr;
  if (a.out)
    out = reinterpret_cast<uint16_t*>(a.out) +
          (matrix * a.rows + chunk_in_rows * a.packed.chunk_rows) * a.packed.in_features;

  if (threadIdx.x == 0) init_archive_barriers(shared);
  fill_table(m.bytes, kMaxCodeBits, shared + kArchiveTableOffset, threadIdx.x, kArchiveThreads);
  __syncthreads();
  if (warp == 0) {
    decode_chunk(m, chunk, shared, lane, out);
  } else if (a.sums.sums) {
    constexpr uint32_t kSummers = kArchiveThreads - kLanes;
    add_warp_sum(block_sum(a.packed, a.sums, matrix, number),
                 sum_bytes(m.bytes, chunk.begin, chunk.end, threadIdx.x - kLanes, kSummers));
  }
  // The barrier in here also makes the decoded pairs older than the patched ones.
  if (!__syncthreads_and(patches_ascend_part(m, chunk, threadIdx.x, kArchiveThreads))) {
    if (threadIdx.x == 0) report(a.status, Flaw::kChunkPatch, matrix, number);
  } else if (out) {
    apply_patches(m, chunk, out);
  }
}

}  // namespace unweight::cuda
