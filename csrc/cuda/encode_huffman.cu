// Sizes and writes huffman stages (docs/FORMAT.md section 7). csrc/cpu/encode_huffman.cpp is the same on a CPU.
//
// Two passes, since a word's place depends on all that stands before it: the first one runs the streams' positions and
// reports what each warp takes in each stage; the second one knows every section's place, and its warps never wait for
// one another.
//
// hot loop: unweight_size_huffman 64 LDS
// budget: unweight_size_huffman 12.0
// hot loop: unweight_write_huffman 16 LDS
// budget: unweight_write_huffman 20.0
#include "../format/code.h"
#include "encode/patches.cuh"

namespace unweight::cuda {
namespace {

constexpr uint32_t kNowhere = 0xFFFFFFFFu;  // the place of a word that is left out
constexpr uint32_t kFirstWords = 4 * kLanes;
// A multiprocessor has room for as many. Not asked for, ptxas takes 64 registers and spills.
constexpr int kCtas = 6;

// A CTA's segment of a block.
struct Segment {
  uint32_t matrix, block, first, unit, stages;  // `first` stage in the block, `unit` that stage in the band
  __device__ __forceinline__ explicit Segment(const Band& band) {
    const uint32_t per_block = band.segments_per_block(), per_matrix = band.blocks() * per_block;
    matrix = blockIdx.x / per_matrix;
    block = blockIdx.x % per_matrix / per_block;
    first = blockIdx.x % per_block * band.segment_stages;
    unit = block * band.stages_per_block + first;
    const uint32_t left = band.stages_per_block - first;
    stages = left < band.segment_stages ? left : band.segment_stages;
  }
};

__device__ __forceinline__ Padding pair_padding(const EncodeArgument& a) {
  return {(a.padding_pair & 255) << 7 | a.padding_pair >> 8 << 23, true};
}

// The codes of a lane's k-step, one behind the other.
struct Codes {
  uint32_t code = 0, bits = 0;
  uint32_t missing = 0;  // bit i: register i has none of its own

  __device__ __forceinline__ Codes(const uint32_t* table, const uint32_t (&registers)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; i++) {
      const uint32_t pair = (registers[i] >> 15 & 0xFF00) | (registers[i] >> 7 & 0xFF);
      const uint32_t entry = __ldg(table + pair), length = entry >> 16 & 15;
      code = code << length | (entry & 0xFFFF);
      bits += length;
      missing |= (entry & kNoCode ? 1u : 0u) << i;
    }
  }
};

// The lanes whose stream passes the end of a word take their next one together, in ascending order.
struct Turn {
  bool full;
  uint32_t before, taken;  // words that lower lanes take, and all lanes
  __device__ __forceinline__ Turn(uint32_t moved, int lane) : full(moved >= 32) {
    const uint32_t lanes = __ballot_sync(kAllLanes, full);
    before = __popc(lanes & ((1u << lane) - 1));
    taken = __popc(lanes);
  }
};

// Which words a stream has, and no content. Words are numbered as the warp takes them.
struct SizedStream {
  uint32_t position = 0, place = 0, next_place = 0;
  uint32_t last = 0;  // the last word that holds a bit of a code

  __device__ __forceinline__ void start(uint32_t first) {
    place = first;
    next_place = first + kLanes;
  }
  __device__ __forceinline__ void append(uint32_t bits, int lane, uint32_t& count) {
    const uint32_t moved = position + bits;
    const Turn turn(moved, lane);
    last = moved > 32 ? next_place : place;
    position = moved & 31;
    if (turn.full) {
      place = next_place;
      next_place = count + turn.before;
    }
    count += turn.taken;
  }
};

}  // namespace

// A CTA a segment. Writes sizes; reads codes and padding_pair.
extern "C" __global__ void __launch_bounds__(kEncodeThreads, kCtas)
    unweight_size_huffman(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Segment segment(a.band);
  const BandMatrix matrix(a, segment.matrix);
  const Padding padding = pair_padding(a);
  const auto* table = reinterpret_cast<const uint32_t*>(a.codes);
  SizedStream streams[2];
  uint32_t count = 0;
  // Lane s keeps what happens in stage s of the segment.
  static_assert(kLanes >= 32, "a segment has at most 32 stages");
  uint32_t count_before = 0, count_after = 0, patches_of = 0;
  bool raw_of = false;

  for (uint32_t s = 0; s < segment.stages; s++) {
    fill_tile(tiles[warp], warp_rows(a.band, matrix, segment.block, segment.first + s, warp), padding, lane);
    uint32_t bits[kKSteps], missing = 0;
#pragma unroll
    for (int k = 0; k < kKSteps; k++) {
      uint32_t registers[kRegisters];
      load_registers(tiles[warp], k, lane, registers);
      const Codes codes(table, registers);
      bits[k] = codes.bits;
      missing += __popc(codes.missing);
    }
    const uint32_t patches = __reduce_add_sync(kAllLanes, missing);
    const uint32_t before = count;
    // One warp with too many makes the stage raw for all; then none of its pairs are in a stream.
    const bool raw = __syncthreads_or(patches > kMaxWarpPatches);
    if (!raw) {
      if (count == 0) {
        streams[0].start(lane);
        streams[1].start(2 * kLanes + lane);
        count = kFirstWords;
      }
#pragma unroll
      for (int k = 0; k < kKSteps; k++) streams[k % 2].append(bits[k], lane, count);
    }
    if (static_cast<uint32_t>(lane) == s) {
      count_before = before;
      count_after = count;
      patches_of = raw ? 0 : patches;
      raw_of = raw;
    }
  }
  const uint32_t last = streams[0].last > streams[1].last ? streams[0].last : streams[1].last;
  const uint32_t kept = count ? __reduce_max_sync(kAllLanes, last) + 1 : 0;
  if (static_cast<uint32_t>(lane) >= segment.stages) return;
  const uint32_t from = count_before < kept ? count_before : kept, to = count_after < kept ? count_after : kept;
  matrix.sizes[(segment.unit + lane) * kWarps + warp] = make_warp_size(to - from, patches_of, false, raw_of);
}

namespace {

// A lane's stream as it is written. Places are words of the segment.
struct WrittenStream {
  uint32_t word = 0, position = 0, place = kNowhere, next_place = kNowhere;

  // `take(i)` gives the place of the i-th word that the warp takes from here on.
  template <class Take>
  __device__ __forceinline__ uint32_t append(uint32_t* words, const Codes& codes, int lane, Take take) {
    const uint32_t aligned = codes.code << (32 - codes.bits);  // 4 to 32 bits
    const uint32_t filled = word | aligned >> position;
    const uint32_t moved = position + codes.bits;
    const Turn turn(moved, lane);
    word = filled;
    if (turn.full) {
      words[place] = filled;
      word = __funnelshift_r(0, aligned, position);
      place = next_place;
      next_place = take(turn.before);
    }
    position = moved & 31;
    return turn.taken;
  }

  // What isn't full, and what holds nothing but has words behind it.
  __device__ __forceinline__ void finish(uint32_t* words) const {
    if (place != kNowhere) words[place] = word;
    if (next_place != kNowhere) words[next_place] = 0;
  }
};

}  // namespace

// A CTA a segment. Reads sizes, codes, padding_pair and the fields for writing.
extern "C" __global__ void __launch_bounds__(kEncodeThreads, kCtas)
    unweight_write_huffman(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  WarpTile& tile = tiles[warp];
  const Segment segment(a.band);
  const BandMatrix matrix(a, segment.matrix);
  const Padding padding = pair_padding(a);
  const auto* table = reinterpret_cast<const uint32_t*>(a.codes);
  uint8_t* const begin = matrix.stage(segment.unit);
  auto* const words = reinterpret_cast<uint32_t*>(begin);
  WrittenStream streams[2];
  bool started = false;

  for (uint32_t s = 0; s < segment.stages; s++) {
    uint8_t* const out = matrix.stage(segment.unit + s);
    const WarpRows rows = warp_rows(a.band, matrix, segment.block, segment.first + s, warp);
    const Section section = warp_section(matrix, segment.unit + s, warp, kHuffmanSections);
    if (section.size.raw()) {
      fill_tile(tile, rows, {0, false}, lane);
      write_raw_warp(tile, out, warp, lane);
      continue;
    }
    fill_tile(tile, rows, padding, lane);
    PatchWriter patches{reinterpret_cast<uint32_t*>(out + section.begin)};
    const uint32_t first_word = static_cast<uint32_t>(out - begin + section.begin) / 4 + section.size.patches();
    uint32_t taken = 0;
    const auto take = [&](uint32_t i) { return taken + i < section.size.words() ? first_word + taken + i : kNowhere; };
    if (!started) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        streams[k].place = take(2 * k * kLanes + lane);
        streams[k].next_place = take((2 * k + 1) * kLanes + lane);
      }
      taken = kFirstWords;
      started = true;
    }
#pragma unroll 1
    for (int pair = 0; pair < kKSteps / 2; pair++) {
      uint32_t plane[4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        uint32_t registers[kRegisters];
        load_registers(tile, 2 * pair + k, lane, registers);
        plane[2 * k] = merge_signs_mantissas(registers[0], registers[1]);
        plane[2 * k + 1] = merge_signs_mantissas(registers[2], registers[3]);
        const Codes codes(table, registers);
        patches.add(2 * pair + k, lane, codes.missing, registers,
                    [](uint32_t weights) { return weights & kExponentBits; });
        taken += streams[k].append(words, codes, lane, take);
      }
      store_plane(out, warp, pair, lane, make_uint4(plane[0], plane[1], plane[2], plane[3]));
    }
    if (lane == 0) store_word(out, 4 * warp, make_warp_header(section.begin, false, patches.ksteps, patches.count));
    if (warp == kWarps - 1) store_stage_end(out, section.end(), lane);
  }
  if (started)
    for (const WrittenStream& stream : streams) stream.finish(words);
}

}  // namespace unweight::cuda
