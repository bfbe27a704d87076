// One warp decodes an archive chunk (docs/FORMAT.md section 8): 64 streams, two a lane. Its words depend on all that
// came before, so a chunk has no more parallelism than this; bytes come through two small rings ahead of their use.
#pragma once
#include "../format/archive.h"
#include "checksum.cuh"
#include "code_table.cuh"
#include "matrix.cuh"
#include "staging.cuh"

namespace unweight::cuda {

// The parts of a chunk, as offsets from the matrix's start. `good`: they fill it exactly, and it lies in the data.
struct Chunk {
  uint64_t begin, end, weights;
  uint64_t plane, positions, pairs, words;
  uint32_t patches, word_count;
  bool good;
};

static __device__ Chunk open_chunk(const PackedArgument& a, const Matrix& m, uint32_t number) {
  const Unit unit = unit_of(m, number);
  Chunk c{};
  c.begin = unit.begin;
  c.end = unit.begin + unit.bytes;
  const uint64_t first_row = number * a.chunk_rows;
  c.weights = min(a.chunk_rows, a.out_features - first_row) * a.in_features;
  c.good = unit.good;  // so it has 16 bytes
  if (!c.good) return c;
  const auto* sizes = reinterpret_cast<const uint32_t*>(m.bytes + c.begin);
  c.patches = sizes[0];
  c.word_count = sizes[1];
  c.plane = c.begin + kChunkHeaderBytes;
  c.positions = c.plane + (c.weights + 15) / 16 * 16;
  c.pairs = c.positions + 4 * uint64_t{c.patches};
  c.words = c.pairs + (2 * uint64_t{c.patches} + 3) / 4 * 4;
  c.good = c.begin + (c.words - c.begin + 4 * uint64_t{c.word_count} + 15) / 16 * 16 == c.end;
  return c;
}

constexpr uint32_t kPlaneRoundBytes = 2 * kRoundPairs;
constexpr uint32_t kPieceWords = kPieceBytes / 4, kPieceRounds = kPieceBytes / kPlaneRoundBytes;

// Consecutive pieces of global memory in a ring in shared memory, for one warp that both asks for them and reads them.
// All lanes call all of it alike.
struct PieceRing {
  uint32_t ring, barriers;  // in shared memory
  const uint8_t* from;
  uint64_t bytes;  // multiple of 16
  uint32_t pieces, asked = 0, ready = 0;

  __device__ __forceinline__ PieceRing(uint32_t ring, uint32_t barriers, const uint8_t* from, uint64_t bytes)
      : ring(ring), barriers(barriers), from(from), bytes(bytes) {
    pieces = static_cast<uint32_t>((bytes + kPieceBytes - 1) / kPieceBytes);
  }

  // Pieces before `first` aren't needed any more: asks for what then has room.
  __device__ __forceinline__ void ask(uint32_t first, uint32_t lane, uint64_t policy) {
    while (asked < pieces && asked < first + kPieces) {
      const uint64_t begin = uint64_t{asked} * kPieceBytes;
      const uint32_t size = static_cast<uint32_t>(min(bytes - begin, uint64_t{kPieceBytes}));
      const uint32_t slot = asked % kPieces;
      copy_to_shared(ring + slot * kPieceBytes, from + begin, size, barriers + 8 * slot, lane, policy);
      asked++;
    }
  }
  // Until pieces before `end` are there, or all that exist.
  __device__ __forceinline__ void wait(uint32_t end) {
    for (; ready < min(end, pieces); ready++) wait_phase(barriers + 8 * (ready % kPieces), ready / kPieces & 1);
  }
  // Nothing may be on its way when the ring is given up.
  __device__ __forceinline__ void drain() { wait(asked); }
};

// Rounds come in groups that use one piece of the plane: what is asked for and waited for is looked at once a group.
struct ArchiveWarp {
  PieceRing plane, words;
  uint32_t table, lane, before;
  uint64_t policy;
  // Words, counted from the word ring's start: the 16-byte step in which they start. Decoding a chunk takes fewer than
  // 2^31, whatever its header says.
  uint32_t next, words_end;
  uint32_t round = 0;
  uint32_t w0[2], w1[2], position[2];  // as in BitStream

  // Barriers are initialised and the table is filled, by this warp or before a barrier of the CTA; `prepare` lets its
  // lanes see that. All of them call this.
  __device__ __forceinline__ ArchiveWarp(const Matrix& m, const Chunk& c, uint32_t shared, uint32_t lane)
      : plane(shared + kPlaneRingOffset, shared, m.bytes + c.plane, c.positions - c.plane),
        words(shared + kWordRingOffset, shared + 8 * kPieces, m.bytes + c.words / 16 * 16, c.end - c.words / 16 * 16),
        table(shared + kArchiveTableOffset),
        lane(lane),
        before(ptx::lanes_before()),
        policy(ptx::evict_first_policy()) {
    next = c.words % 16 / 4;
    words_end = next + min(c.word_count, 1u << 31);
    prepare();  // of these words at most 128 + 3 are taken here, and all are there
#pragma unroll
    for (int s = 0; s < 2; s++) {
      w0[s] = word(next + kLanes * s + lane);
      w1[s] = word(next + kArchiveStreams + kLanes * s + lane);
      position[s] = 0;
    }
    next += 2 * kArchiveStreams;
  }

  // Words behind the last are 0.
  __device__ __forceinline__ uint32_t word(uint32_t at) const {
    return at < words_end ? ptx::load_shared(words.ring + 4 * (at % (kPieces * kPieceWords))) : 0;
  }

  // Before each group of rounds: its signs are there, and as many words as it can take.
  __device__ __forceinline__ void prepare() {
    const uint32_t piece = round / kPieceRounds, first = min(next, words_end);
    __syncwarp();  // what was in the rings is read
    plane.ask(piece, lane, policy);
    words.ask(first / kPieceWords, lane, policy);
    plane.wait(piece + 1);
    words.wait((first + kPieceRounds * kArchiveStreams - 1) / kPieceWords + 1);
  }
  __device__ __forceinline__ bool group_starts() const { return round % kPieceRounds == 0; }

  __device__ __forceinline__ uint32_t entry(uint32_t x) const {
    return ptx::load_shared(table + (x >> (32 - kMaxCodeBits) << 2));
  }

  // Entries of the round's pairs lane, lane + 32, lane + 64, lane + 96.
  __device__ __forceinline__ void decode(uint32_t (&entries)[4]) {
    uint32_t takes[2];
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint32_t before_round = position[s];
      uint32_t x = funnel_left(w1[s], w0[s], before_round);
      entries[s] = entry(x);
      x = funnel_left(0, x, entries[s]);  // 12 of 32 bits are gone at most: enough for the second
      entries[2 + s] = entry(x);
      position[s] += entries[s] + entries[2 + s];
      takes[s] = (position[s] ^ before_round) & 32;  // at most 24 bits, so at most one word is used up
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint32_t takers = ptx::ballot(takes[s]);
      const uint32_t fresh = word(next + __popc(takers & before));
      next += __popc(takers);
      w0[s] = takes[s] ? w1[s] : w0[s];
      w1[s] = takes[s] ? fresh : w1[s];
    }
    round++;
  }

  // Signs and mantissas of pair `first` + lane of the round that `decode` gave last, where a register has them.
  __device__ __forceinline__ uint32_t signs(uint32_t first) const {
    const uint32_t at = (round - 1) % (kPieces * kPieceRounds) * kPlaneRoundBytes + 2 * lane;
    return spread_signs(ptx::load_shared_half(plane.ring + at + 2 * first));
  }

  static __device__ __forceinline__ uint32_t spread_signs(uint32_t two_bytes) {
    const uint32_t apart = __byte_perm(two_bytes, 0, 0x4140);
    return (apart & 0x00800080u) << 8 | (apart & 0x007F007Fu);
  }

  __device__ __forceinline__ void finish() {
    plane.drain();
    words.drain();
  }
};

// Patches ascend, so no two are of one pair, and threads can set them in any order. The share of one thread.
static __device__ bool patches_ascend_part(const Matrix& m, const Chunk& c, uint32_t thread, uint32_t threads) {
  const auto* positions = reinterpret_cast<const uint32_t*>(m.bytes + c.positions);
  bool good = true;
  for (uint32_t i = thread; i < c.patches; i += threads) {
    good &= 2 * uint64_t{positions[i]} < c.weights;
    good &= i == 0 || positions[i - 1] < positions[i];
  }
  return good;
}

// The two weights of patch `number`. (The last of an odd chunk has a neighbour in the plane: zeros.)
static __device__ __forceinline__ uint32_t patched_pair(const Matrix& m, const Chunk& c, uint32_t number) {
  const uint8_t* plane =
      m.bytes + c.plane + 2 * uint64_t{reinterpret_cast<const uint32_t*>(m.bytes + c.positions)[number]};
  const uint32_t pair = reinterpret_cast<const uint16_t*>(m.bytes + c.pairs)[number];
  return ArchiveWarp::spread_signs(plane[0] | uint32_t{plane[1]} << 8) | make_code_entry(pair, 0);
}

static __device__ __forceinline__ void init_archive_barriers(uint32_t shared) {
  for (uint32_t i = 0; i < 2 * kPieces; i++) ptx::mbarrier_init(shared + 8 * i, kCopyArrivals);
  ptx::fence_mbarrier_init();
}

}  // namespace unweight::cuda
