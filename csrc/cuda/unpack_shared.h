// How the unpacking kernels use their threads and shared memory: the host launches them with these sizes.
#pragma once
#include <cstdint>

#include "../format/archive.h"
#include "../format/tile.h"
#include "arguments.h"

namespace unweight::cuda {

// --- tiles: a warp that copies stages into a ring, and a warpgroup that decodes them

constexpr uint32_t kUnpackThreads = kLanes * (kWarps + 1);
// Two stages in flight while one is decoded; with two (table) or three CTAs a multiprocessor that covers the latency.
constexpr uint32_t kRingSlots = 3;
constexpr uint32_t kSlotBytes = (kRawStageBytes + 127) / 128 * 128;
static_assert(kHuffmanSections + 4 * kWarps * (kMaxWarpPatches + kMaxWarpWords) <= kSlotBytes &&
                  kNibbleSections + 4 * kWarps * (kMaxWarpPatches + 1) <= kSlotBytes,
              "a slot takes every stage");

// Rows of a decoded tile are 16 bytes apart in banks, so that matrices of 8 rows are stored without conflicts.
constexpr uint32_t kTilePitch = 2 * kStageColumns + 16;
constexpr uint32_t kTileBytes = kWarpRows * kTilePitch;  // of one warp

constexpr uint32_t kCodeTableRow = 4 * kLanes;  // a copy of the entry for each lane, in a bank of its own
constexpr uint32_t kCodeTableBytes = 256 * kCodeTableRow;

// Byte offsets in dynamic shared memory. Barriers first: full[slots], empty[slots], and the bytes in each slot.
constexpr uint32_t kFullOffset = 0, kEmptyOffset = 8 * kRingSlots, kLengthOffset = 16 * kRingSlots;
constexpr uint32_t kRingOffset = 128;
constexpr uint32_t kTileOffset = kRingOffset + kRingSlots * kSlotBytes;
constexpr uint32_t kUnpackShared = kTileOffset + kWarps * kTileBytes;
constexpr uint32_t kTableOffset = (kUnpackShared + 127) / 128 * 128;
constexpr uint32_t kUnpackSharedWithTable = kTableOffset + kCodeTableBytes;
static_assert(kLengthOffset + 4 * kRingSlots <= kRingOffset, "barriers and lengths lie before the ring");
static_assert(2 * (kUnpackSharedWithTable + 1024) <= 227 * 1024 && 3 * (kUnpackShared + 1024) <= 227 * 1024,
              "two CTAs of a Hopper multiprocessor with the table, three without");
static_assert(kUnpackSharedWithTable <= kLeastSharedLimit, "every GPU can run one");

// --- archives: a warp that decodes a chunk, and others that sum its bytes meanwhile

constexpr uint32_t kArchiveWarps = 4, kArchiveThreads = kLanes * kArchiveWarps;
constexpr uint32_t kArchiveTableBytes = 4 << 12;
// Two rings, of signs with mantissas and of code words. A round takes 256 bytes of the one and at most 256 of the
// other.
constexpr uint32_t kPieces = 4, kPieceBytes = 1024;
constexpr uint32_t kArchiveBarriers = 16 * kPieces;
constexpr uint32_t kPlaneRingOffset = 128, kWordRingOffset = kPlaneRingOffset + kPieces * kPieceBytes;
constexpr uint32_t kArchiveTableOffset = kWordRingOffset + kPieces * kPieceBytes;
constexpr uint32_t kArchiveShared = kArchiveTableOffset + kArchiveTableBytes;
static_assert(kArchiveBarriers <= kPlaneRingOffset, "barriers lie before the rings");
static_assert(kPieceBytes % (4 * kRoundPairs / 2) == 0, "a round's plane lies in one piece");

}  // namespace unweight::cuda
