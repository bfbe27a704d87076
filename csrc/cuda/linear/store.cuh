// From a lane's sums to y (docs/KERNELS.md has the picture of a lane's registers).
#pragma once
#include "../ptx.cuh"
#include "walk.cuh"

namespace unweight::cuda {

constexpr float kNaN = __builtin_nanf("");

// Where a warp's sums go and what becomes of them. It waits in shared memory while the warp multiplies: the first words
// from a matrix and tile to the next, the others from a group to the next.
struct Place {
  // All segments of a block; a part of them, without the last one; with it.
  enum Kind : uint32_t { kNowhere, kOutput, kPiece, kLastPiece };

  uint32_t weight, matrix;
  uint32_t first_token, tokens;
  float scale;  // NaN: the matrix is damaged
  uint32_t kind, block;

  // By one lane.
  static __device__ __forceinline__ void park_job(uint32_t address, uint32_t weight, const Tile& tile, float scale,
                                                  bool good, Layout layout) {
    ptx::store_shared(address, weight);
    ptx::store_shared(address + 4, tile.matrix);
    ptx::store_shared(address + 8, tile.first_token);
    ptx::store_shared(address + 12, tile.tokens);
    ptx::store_shared(address + 16, __float_as_uint(scale));
    ptx::store_shared(address + 28, good);
    ptx::store_shared(address + 32, static_cast<uint32_t>(layout));
  }
  static __device__ __forceinline__ void park_group(uint32_t address, Kind kind, uint32_t block) {
    ptx::store_shared(address + 20, kind);
    ptx::store_shared(address + 24, block);
  }
  // By all lanes, when the warp has met.
  static __device__ __forceinline__ uint32_t is_good(uint32_t address) { return ptx::load_shared(address + 28); }
  static __device__ __forceinline__ Layout layout(uint32_t address) {
    return static_cast<Layout>(ptx::load_shared(address + 32));
  }
  // By all lanes. Nothing is parked while some may still read.
  static __device__ __forceinline__ Place parked(uint32_t address) {
    uint32_t w[7];
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 7; i++) w[i] = ptx::load_shared(address + 4 * i);
    __syncwarp();
    return {w[0], w[1], w[2], w[3], __uint_as_float(w[4]), ptx::uniform(w[5]), ptx::uniform(w[6])};
  }
};

// The part of y of one block of 64 rows of a matrix and one tile of tokens, as one lane of a warpgroup sees it. Lanes
// l and l + 4 hold neighbouring rows: they exchange, so that each stores two rows of one token.
struct BlockOutput {
  uint64_t y, bias;        // addresses: of the tile's first token and row 0 of the matrix, of the matrix's bias or 0
  uint64_t stride;         // elements from token to token
  uint64_t rows, row;      // of the matrix; the first of the lane's pair, the other pair is 8 further
  uint32_t token, tokens;  // the lane's in each group of 8; of the tile
  bool float_output;

  __device__ __forceinline__ BlockOutput(const LinearArgument& a, uint32_t weight, uint32_t matrix, uint32_t block,
                                         uint32_t first_token, uint32_t tokens)
      : tokens(tokens), float_output(a.float_output) {
    const WeightArgument& w = a.weights[weight];
    const uint32_t thread = ptx::pinned(threadIdx.x) % kWarpgroupThreads, lane = thread % kLanes, odd = lane / 4 % 2;
    rows = w.packed.out_features;
    row = uint64_t{block} * kBlockRows + kWarpRows * (thread / kLanes) + lane / 8 * 2;
    token = 2 * (lane % 4) + odd;
    stride = w.y_stride;
    y = w.y + (float_output ? 4 : 2) * (first_token * stride);
    bias = w.bias ? w.bias + 2 * (matrix * rows) : 0;
  }

  // Sums 4q … 4q + 3 of the lane: tokens [8q, 8q + 8) of the tile. All lanes call it.
  __device__ __forceinline__ void store(uint32_t q, float s0, float s1, float s2, float s3) const {
    const bool odd = token % 2;
    const float a = __shfl_xor_sync(0xFFFFFFFFu, odd ? s0 : s1, 4), b = __shfl_xor_sync(0xFFFFFFFFu, odd ? s2 : s3, 4);
    const uint32_t t = 8 * q + token;
    if (t >= tokens) return;
    store_pair(t, row, odd ? a : s0, odd ? s1 : a);
    store_pair(t, row + 8, odd ? b : s2, odd ? s3 : b);
  }

 private:
  __device__ __forceinline__ void store_pair(uint32_t t, uint64_t r, float first, float second) const {
    if (r >= rows) return;
    const bool both = r + 1 < rows;
    if (bias) {
      const auto* b = reinterpret_cast<const uint16_t*>(bias) + r;
      first += __uint_as_float(uint32_t{b[0]} << 16);
      if (both) second += __uint_as_float(uint32_t{b[1]} << 16);
    }
    const uint64_t at = t * stride + r;
    if (float_output)
      store_elements(reinterpret_cast<float*>(y) + at, make_float2(first, second), first, second, both);
    else {
      const uint32_t pair = ptx::to_bfloat16(first, second);
      store_elements(reinterpret_cast<uint16_t*>(y) + at, pair, static_cast<uint16_t>(pair),
                     static_cast<uint16_t>(pair >> 16), both);
    }
  }
  template <class Element, class Pair>
  static __device__ __forceinline__ void store_elements(Element* to, Pair pair, Element first, Element second,
                                                        bool both) {
    if (both && reinterpret_cast<uint64_t>(to) % sizeof pair == 0) {
      *reinterpret_cast<Pair*>(to) = pair;
      return;
    }
    to[0] = first;
    if (both) to[1] = second;
  }
};

}  // namespace unweight::cuda
