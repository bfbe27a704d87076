// docs/FORMAT.md sections 1 and 2: the header, and where the parts of a packed matrix are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tile.h"

namespace unweight {

enum class Layout : uint8_t { kRaw = 0, kHuffman = 1, kNibble = 2, kArchive = 3 };
const char* layout_name(Layout layout);

constexpr size_t kHeaderBytes = 128;
constexpr uint16_t kFormatVersion = 1;
constexpr uint8_t kBFloat16 = 1;
constexpr int kMaxRank = 8;
// So that places in a chunk, and in the index the ends of stages, fit 32 bits.
constexpr uint64_t kMaxFeatures = uint64_t{1} << 32, kMaxWeights = uint64_t{1} << 33, kMaxStages = uint64_t{1} << 21;
static_assert(kMaxStages * kRawStageBytes / 16 < kMaxFeatures, "the index counts steps of 16 bytes in 32 bits");
constexpr uint64_t kArchiveChunkWeights = uint64_t{1} << 20;

struct Header {
  uint8_t magic[8];
  uint16_t version;
  Layout layout;
  uint8_t dtype;
  uint8_t longest_code;
  uint8_t nibble_base;
  uint8_t rank;
  uint8_t segment_stages;
  uint64_t header_checksum;
  uint64_t out_features;
  uint64_t in_features;
  uint64_t used_bytes;
  uint64_t index_offset;
  uint64_t checksums_offset;
  uint64_t data_offset;
  uint64_t code_id;
  uint64_t patches;
  uint64_t reserved;
  uint32_t shape[kMaxRank];

  bool tiled() const { return layout != Layout::kArchive; }
  uint64_t stages_per_block() const { return (in_features + kStageColumns - 1) / kStageColumns; }
  uint64_t chunk_rows() const;  // rows of an archive chunk
  uint64_t blocks() const;      // 64-row blocks, or archive chunks: what has a checksum of its own
  uint64_t units() const;       // stages, or archive chunks: what the index counts
};
static_assert(sizeof(Header) == kHeaderBytes, "the struct is the format");

// Why a matrix of this layout, out_features and in_features can't be packed, or nullptr.
const char* too_large(const Header& header);

// Bytes that a matrix takes at least in a layout, whatever its weights are. UINT64_MAX if it is too large for it.
uint64_t least_bytes(Layout layout, uint64_t out_features, uint64_t in_features);

// docs/FORMAT.md section 9: stages of a segment. Long ones cost fewer bits, short ones are easier to share out evenly
// to the multiprocessors of a Hopper GPU.
constexpr uint64_t kLeastSegment = 8, kMostSegment = 32, kMultiprocessors = 132;
int segment_stages(uint64_t out_features, uint64_t in_features);

// Fills in everything that follows from layout, shape and code bytes: offsets, segment. Not used_bytes or checksums.
void place_sections(Header& header, size_t code_bytes);

// A checked view of one packed matrix. `bytes` is everything that may be read.
struct Packed {
  Header header;
  const uint8_t* bytes;

  uint64_t unit_offset(uint64_t unit) const;  // from `bytes`; unit = units() gives used_bytes
  uint64_t block_checksum(uint64_t block) const;
  uint64_t first_unit(uint64_t block) const { return header.tiled() ? block * header.stages_per_block() : block; }
};

// Checks the header and the index's ends: everything an access needs that isn't checked where it happens. O(1).
// Throws Error naming the field, what it holds and what is allowed.
Packed open_packed(const uint8_t* bytes, size_t size);

// The start and end of a unit, checked against the tensor. Throws Error.
struct Range {
  uint64_t begin, end;
};
Range unit_range(const Packed& packed, uint64_t unit);

// Everything that costs a pass over what lies before the data: its checksum, the whole index, the gaps.
void check_sections(const Packed& packed);
// The same, and the padding after the data.
void check_header(const Packed& packed, size_t size);

// Compares the checksum of one block's bytes, computed by `sum` (checksum.h, or a faster one). Throws Error.
using Checksum = uint64_t (*)(const uint8_t* bytes, size_t size);
void check_block(const Packed& packed, uint64_t block, Checksum sum);
void check_block_sum(const Packed& packed, uint64_t block, uint64_t sum);

}  // namespace unweight
