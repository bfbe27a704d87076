// How the embedding kernels use their threads and shared memory.
#pragma once
#include "unpack_shared.h"

namespace unweight::cuda {

// A CTA looks up one id at a time; its warps share the row's stages (raw, nibble) or segments (huffman).
constexpr uint32_t kEmbeddingWarps = 8, kEmbeddingThreads = kLanes * kEmbeddingWarps;
constexpr uint32_t kEmbeddingCtas = 2;  // of a multiprocessor: what its registers hold
// Of a huffman stage: one warp's patches (as many as a header can say) and words, from the 16-byte step in which they
// start.
constexpr uint32_t kSectionBytes = (4 * (255 + kMaxWarpWords) + 31) / 16 * 16;
constexpr uint32_t kSectionSlots = 2;
// Byte offsets in dynamic shared memory: barriers, the code table (one copy), the sections of each warp.
constexpr uint32_t kEmbeddingTableOffset = 8 * kEmbeddingWarps * kSectionSlots;
constexpr uint32_t kSectionOffset = kEmbeddingTableOffset + 4 * 256;
constexpr uint32_t kEmbeddingShared = kSectionOffset + kEmbeddingWarps * kSectionSlots * kSectionBytes;
static_assert(kSectionOffset % 16 == 0 && kEmbeddingTableOffset % 16 == 0, "bulk copies need it");

constexpr uint32_t kArchiveEmbeddingThreads = kLanes;

}  // namespace unweight::cuda
