// A stage's bytes, checked, for the AVX-512 decoders. Local to the file that includes it, see vectors_avx512.h.
#pragma once
#include "matrix_view.h"
#include "vectors_avx512.h"

namespace unweight {
namespace {

struct Stage {
  const uint8_t* bytes;
  uint64_t size;
  bool prefetch;  // see prefetch_ahead
};

// False if it isn't inside the data, with room for the headers and the S-plane.
UNWEIGHT_INLINE bool find_stage(const MatrixView& matrix, uint64_t stage, bool prefetch, Stage& found) {
  const uint8_t* entry = matrix.bytes + matrix.index_offset + 4 * stage;
  const uint64_t begin = matrix.data_offset + 16 * uint64_t{load_word(entry)};
  const uint64_t end = matrix.data_offset + 16 * uint64_t{load_word(entry + 4)};
  if (begin > end || end > matrix.used_bytes || end - begin < kHuffmanSections) return false;
  found = {matrix.bytes + begin, end - begin, prefetch};
  return true;
}

// The stream is read linearly, and the hardware's prefetchers alone leave a third of the bandwidth unused. Part `part`
// of the work on a stage asks for as much of what is one and a half stages ahead (measured: 1 to 2 are alike). Into the
// second level: the first one has no room for that much.
template <int kParts>
UNWEIGHT_INLINE void prefetch_ahead(const Stage& stage, int part) {
  const uint64_t share = stage.prefetch ? stage.size / kParts : 0;
  // An address, not a pointer: it may be behind the tensor, where a prefetch does nothing.
  const uintptr_t from = reinterpret_cast<uintptr_t>(stage.bytes) + 3 * stage.size / 2 + part * share;
  for (uint64_t i = 0; i < share; i += kVectorBytes) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
}

// Where a warp's signs and mantissas are, and its codes in a nibble stage.
UNWEIGHT_INLINE const uint8_t* warp_plane(const Stage& stage, int warp) {
  return stage.bytes + kStageHeaderBytes + warp * kWarpPlaneBytes;
}
UNWEIGHT_INLINE const uint8_t* warp_nibbles(const Stage& stage, int warp) {
  return stage.bytes + kHuffmanSections + warp * kWarpNibbleBytes;
}

// Patches that haven't been applied.
struct Patches {
  const uint8_t* next;
  uint32_t left;
  uint32_t ksteps;  // of the patches that are left
};

// What a warp has behind the planes.
struct WarpSection {
  Patches patches;
  const uint8_t* words;  // huffman; where the section ends in a nibble stage
  uint32_t zero_rows;    // bit r: row r of the warp
};

// False if the section isn't inside the stage, behind the planes. Of a nibble stage that also means that it has them.
UNWEIGHT_INLINE bool open_section(const Stage& stage, int warp, bool nibble, WarpSection& section) {
  const WarpHeader header{load_word(stage.bytes + 4 * warp)};
  const bool masked = nibble && header.has_zero_rows();
  const uint64_t patches = header.section() + 4 * masked, words = patches + 4 * header.patches();
  if (header.section() < static_cast<uint32_t>(nibble ? kNibbleSections : kHuffmanSections) || words > stage.size)
    return false;
  section = {{stage.bytes + patches, header.patches(), header.patched_ksteps()},
             stage.bytes + words,
             masked ? load_word(stage.bytes + header.section()) & 0xFFFF : 0};
  return true;
}

// Whether there are as many patches as their k-steps need.
UNWEIGHT_INLINE bool patches_fit(Patches patches) {
  for (; (patches.left != 0) & (patches.ksteps != 0); patches.left--, patches.next += 4)
    if (!(load_word(patches.next) & kPatchContinues)) patches.ksteps &= patches.ksteps - 1;
  return !patches.left && !patches.ksteps;
}

}  // namespace
}  // namespace unweight
