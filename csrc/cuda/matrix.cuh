// A checked view of one packed matrix in device memory (docs/FORMAT.md sections 1 to 4). What a check here lets pass
// can be read without further ado; what isn't checked here is checked where it is read.
#pragma once
#include "../format/code.h"
#include "arguments.h"
#include "status.h"

namespace unweight::cuda {

constexpr uint64_t kMagicWord = 0x5448474945574e55u;  // UNWEIGHT

struct Matrix {
  const uint8_t* bytes;
  const uint32_t* index;      // where units start, in 16-byte steps from the data; units + 1 entries
  const uint64_t* checksums;  // of the blocks or chunks
  uint64_t data_offset, used_bytes;
  uint32_t units, blocks;  // as the index and the checksums count them
  uint32_t segment_stages, code_symbols;
  Layout layout;
  uint32_t nibble_base;
};

static __device__ __forceinline__ const uint16_t* code_counts(const uint8_t* matrix) {
  return reinterpret_cast<const uint16_t*>(matrix + kHeaderBytes);
}

static __device__ __forceinline__ const uint16_t* code_pairs(const uint8_t* matrix) {
  return reinterpret_cast<const uint16_t*>(matrix + kHeaderBytes + kCodeCountBytes);
}

// What every CTA does first, all threads alike: the same checks as open_packed and read_code on the host. Whoever gets
// a flaw reports it and returns. kLayout: the header is fine and says another layout than the host.
static __device__ Flaw open_matrix(const PackedArgument& a, uint32_t number, Matrix& m) {
  m = {};  // some of its readers go on after a flaw, and the compiler may read ahead
  m.bytes = reinterpret_cast<const uint8_t*>(a.packed + number * a.matrix_bytes);
  if (a.matrix_bytes < kHeaderBytes) return Flaw::kHeader;
  const Header& h = *reinterpret_cast<const Header*>(m.bytes);
  m.layout = h.layout;
  m.segment_stages = h.segment_stages;
  m.nibble_base = h.nibble_base;
  m.used_bytes = h.used_bytes;
  m.data_offset = h.data_offset;
  const bool archive = m.layout == Layout::kArchive, nibble = m.layout == Layout::kNibble;
  const uint32_t longest = m.layout == Layout::kHuffman ? 8 : archive ? kMaxCodeBits : 0;
  bool good = *reinterpret_cast<const uint64_t*>(h.magic) == kMagicWord;
  good &= h.version == kFormatVersion && h.layout <= Layout::kArchive && h.dtype == kBFloat16;
  good &= h.longest_code == longest;
  good &= nibble ? m.nibble_base - 1 < 239 : m.nibble_base == 0;
  good &= archive ? m.segment_stages == 0 : m.segment_stages >= kLeastSegment && m.segment_stages <= kMostSegment;
  good &= h.out_features == a.out_features && h.in_features == a.in_features && h.reserved == 0;
  good &= h.rank >= 2 && h.rank <= kMaxRank && h.shape[0] == a.out_features;
  uint64_t columns = 1;
  for (int i = 1; i < kMaxRank; i++) {
    if (i < h.rank)
      columns = columns < kMaxFeatures ? columns * h.shape[i] : 0;
    else
      good &= h.shape[i] == 0;
  }
  good &= columns == a.in_features;
  const uint64_t stages = uint64_t{a.blocks} * a.stages_per_block;
  good &= archive || stages <= kMaxStages;
  if (!good) return Flaw::kHeader;

  m.blocks = archive ? a.chunks : a.blocks;
  m.units = archive ? a.chunks : static_cast<uint32_t>(stages);
  uint64_t code_bytes = 0;
  bool code = true;
  m.code_symbols = 0;
  if (longest) {
    if (a.matrix_bytes < kHeaderBytes + kCodeCountBytes) return Flaw::kHeader;
    const uint16_t* counts = code_counts(m.bytes);
    uint32_t space = 0;
    for (uint32_t length = 0; length < 16; length++) {
      const uint32_t count = counts[length];
      m.code_symbols += count;
      if (length == 0 || length > longest)
        code &= count == 0;
      else
        space += count << (longest - length);
    }
    code &= m.code_symbols > 0 && space <= 1u << longest;
    code_bytes = kCodeCountBytes + 2 * uint64_t{m.code_symbols};
  }
  // Nothing here can wrap: sizes are below 2^40.
  const uint64_t index = (kHeaderBytes + code_bytes + 15) / 16 * 16;
  const uint64_t checksums = (index + 4 * (uint64_t{m.units} + 1) + 15) / 16 * 16;
  const uint64_t data = (checksums + 8 * uint64_t{m.blocks} + 127) / 128 * 128;
  good = h.index_offset == index && h.checksums_offset == checksums && h.data_offset == data;
  good &= h.used_bytes >= data && h.used_bytes <= a.matrix_bytes;
  const uint64_t least =
      archive ? a.out_features * a.in_features : uint64_t{m.units} * static_cast<uint64_t>(kHuffmanSections);
  if (!good || h.used_bytes - data < least) return Flaw::kHeader;
  m.index = reinterpret_cast<const uint32_t*>(m.bytes + index);
  m.checksums = reinterpret_cast<const uint64_t*>(m.bytes + checksums);
  if (m.index[0] != 0 || data + 16 * uint64_t{m.index[m.units]} != h.used_bytes) return Flaw::kHeader;
  if (!code) return Flaw::kCode;
  return a.layout >= 0 && a.layout != static_cast<int32_t>(m.layout) ? Flaw::kLayout : Flaw::kNone;
}

// The bytes of a unit, and whether they lie in the data.
struct Unit {
  uint64_t begin, bytes;  // from the matrix's start
  bool good;
};

static __device__ __forceinline__ Unit unit_of(const Matrix& m, uint32_t unit) {
  const uint32_t begin = m.index[unit], end = m.index[unit + 1];
  const uint64_t offset = m.data_offset + 16 * uint64_t{begin};
  return {offset, 16 * uint64_t{end - begin}, begin < end && m.data_offset + 16 * uint64_t{end} <= m.used_bytes};
}

static __device__ __forceinline__ void report(DeviceAddress status, Flaw flaw, uint32_t matrix, uint64_t place) {
  atomicMax(reinterpret_cast<unsigned long long*>(status),
            static_cast<unsigned long long>(make_status(flaw, matrix, place)));
}

// What a flaw of open_matrix is about.
static __device__ __forceinline__ uint64_t flaw_place(Flaw flaw, const Matrix& m) {
  return flaw == Flaw::kLayout ? static_cast<uint64_t>(m.layout) : 0;
}

}  // namespace unweight::cuda
