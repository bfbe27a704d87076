#include "header.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "checksum.h"
#include "code.h"
#include "error.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian and read in place");

namespace unweight {
namespace {

constexpr char kMagic[] = "UNWEIGHT";

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
uint64_t align(uint64_t a, uint64_t to) { return ceil_div(a, to) * to; }

template <class T>
T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

void check_zero(const uint8_t* bytes, uint64_t begin, uint64_t end, const char* what) {
  for (uint64_t i = begin; i < end; i++)
    if (bytes[i]) fail("packed: byte ", i, " (", what, ") is ", int{bytes[i]}, ", expected 0");
}

template <class T, class U>
void check_field(const char* name, T got, U expected) {
  if (got != static_cast<T>(expected)) fail("packed: header field ", name, " is ", +got, ", expected ", +expected);
}

}  // namespace

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kRaw: return "raw";
    case Layout::kHuffman: return "huffman";
    case Layout::kNibble: return "nibble";
    case Layout::kArchive: return "archive";
  }
  return "unknown";
}

uint64_t Header::chunk_rows() const { return kBlockRows * ceil_div(kArchiveChunkWeights, kBlockRows * in_features); }
uint64_t Header::blocks() const { return ceil_div(out_features, tiled() ? kBlockRows : chunk_rows()); }
uint64_t Header::units() const { return tiled() ? blocks() * stages_per_block() : blocks(); }

const char* too_large(const Header& h) {
  const uint64_t n = h.out_features, k = h.in_features;
  if (n < 1 || k < 1 || n >= kMaxFeatures || k >= kMaxFeatures) return "allowed are 1 to 2^32 - 1 rows and columns";
  if (n > kMaxWeights / k) return "allowed are 2^33 weights in all";
  if (h.tiled() && h.units() > kMaxStages) return "padded to tiles of 64 x 128 they are more than 2^34";
  return nullptr;
}

uint64_t least_bytes(Layout layout, uint64_t out_features, uint64_t in_features) {
  Header h{};
  h.layout = layout;
  h.out_features = out_features;
  h.in_features = in_features;
  if (too_large(h)) return UINT64_MAX;
  place_sections(h, layout == Layout::kHuffman || layout == Layout::kArchive ? kCodeCountBytes + 2 : 0);
  const uint64_t stage = layout == Layout::kRaw      ? kRawStageBytes
                         : layout == Layout::kNibble ? kNibbleSections
                                                     : kHuffmanSections;
  return h.data_offset + (h.tiled() ? h.units() * stage : out_features * in_features);
}

int segment_stages(uint64_t out_features, uint64_t in_features) {
  const uint64_t blocks = ceil_div(out_features, kBlockRows), stages = ceil_div(in_features, kStageColumns);
  // Too few units to fill a GPU either way: restart streams less often.
  if (blocks * ceil_div(stages, kLeastSegment) < 64) return 16;
  // The work of the busiest multiprocessor, times their number.
  const auto busiest = [&](uint64_t length) {
    const uint64_t work = blocks * stages, round = kMultiprocessors * length;
    return stages % length ? work + round / 2 : ceil_div(work, round) * round;
  };
  uint64_t best = kLeastSegment;
  for (uint64_t length = best + 1; length <= kMostSegment && length <= stages; length++)
    if ((107 * length + 13) * busiest(length) * best < (107 * best + 13) * busiest(best) * length) best = length;
  return static_cast<int>(best);
}

void place_sections(Header& h, size_t code_bytes) {
  std::memcpy(h.magic, kMagic, sizeof h.magic);
  h.version = kFormatVersion;
  h.dtype = kBFloat16;
  h.segment_stages = h.tiled() ? segment_stages(h.out_features, h.in_features) : 0;
  h.index_offset = align(kHeaderBytes + code_bytes, 16);
  h.checksums_offset = align(h.index_offset + 4 * (h.units() + 1), 16);
  h.data_offset = align(h.checksums_offset + 8 * h.blocks(), 128);
}

Packed open_packed(const uint8_t* bytes, size_t size) {
  if (size < kHeaderBytes) fail("packed: ", size, " bytes, a header alone has ", kHeaderBytes);
  Packed p{load<Header>(bytes), bytes};
  const Header& h = p.header;
  if (std::memcmp(h.magic, kMagic, sizeof h.magic)) fail("packed: not a packed weight (no UNWEIGHT at its start)");
  if (h.version != kFormatVersion)
    fail("packed: format version ", h.version, ", this build reads version ", kFormatVersion,
         "; a newer unweight-ext is needed");
  if (h.layout > Layout::kArchive) fail("packed: header field layout is ", int(h.layout), ", allowed are 0 to 3");
  check_field("dtype", h.dtype, kBFloat16);
  const int longest = h.layout == Layout::kHuffman ? 8 : h.layout == Layout::kArchive ? kMaxCodeBits : 0;
  check_field("longest code", h.longest_code, longest);
  if (h.layout == Layout::kNibble ? h.nibble_base < 1 || h.nibble_base > 239 : h.nibble_base != 0)
    fail("packed: header field nibble base is ", int{h.nibble_base}, ", allowed are 1 to 239 for nibble, else 0");
  if (const char* reason = too_large(h))
    fail("packed: header says ", h.out_features, " x ", h.in_features, " weights; ", reason);
  if (h.tiled() ? h.segment_stages < kLeastSegment || h.segment_stages > kMostSegment : h.segment_stages != 0)
    fail("packed: header field segment stages is ", int{h.segment_stages}, ", allowed are 8 to 32, and 0 for archive");
  if (h.rank < 2 || h.rank > kMaxRank) fail("packed: header field rank is ", int{h.rank}, ", allowed are 2 to 8");
  check_field("shape[0]", h.shape[0], h.out_features);
  uint64_t columns = 1;
  for (int i = 1; i < kMaxRank; i++) {
    if (i >= h.rank) check_field("shape past its rank", h.shape[i], 0u);
    if (i < h.rank) columns = columns < kMaxFeatures ? columns * h.shape[i] : 0;
  }
  check_field("product of shape[1:]", columns, h.in_features);
  check_field("reserved", h.reserved, 0u);

  // Every size is below 2^40 · 4, so sums of them can't wrap.
  Header expected = h;
  size_t code_bytes = 0;
  if (longest) {
    if (size < kHeaderBytes + kCodeCountBytes) fail("packed: the code table is cut off at ", size, " bytes");
    uint64_t n = 0;
    for (int i = 0; i < 16; i++) n += load<uint16_t>(bytes + kHeaderBytes + 2 * i);
    code_bytes = kCodeCountBytes + 2 * n;
  }
  place_sections(expected, code_bytes);
  check_field("index offset", h.index_offset, expected.index_offset);
  check_field("checksums offset", h.checksums_offset, expected.checksums_offset);
  check_field("data offset", h.data_offset, expected.data_offset);
  if (h.used_bytes > size || h.used_bytes < h.data_offset)
    fail("packed: header says ", h.used_bytes, " bytes are used; there are ", size, ", and the data start at ",
         h.data_offset);
  // Signs and mantissas are never compressed, so a small file can't claim a huge matrix.
  const uint64_t least = h.tiled() ? h.units() * kHuffmanSections : h.out_features * h.in_features;
  if (h.used_bytes - h.data_offset < least)
    fail("packed: ", h.used_bytes - h.data_offset, " bytes of data for ", h.out_features, " x ", h.in_features,
         " weights; at least ", least, " are needed");
  if (p.unit_offset(0) != h.data_offset || p.unit_offset(h.units()) != h.used_bytes)
    fail("packed: the index says ", p.unit_offset(0), " to ", p.unit_offset(h.units()), ", the header ", h.data_offset,
         " to ", h.used_bytes);
  return p;
}

uint64_t Packed::unit_offset(uint64_t unit) const {
  return header.data_offset + 16 * uint64_t{load<uint32_t>(bytes + header.index_offset + 4 * unit)};
}

uint64_t Packed::block_checksum(uint64_t block) const {
  return load<uint64_t>(bytes + header.checksums_offset + 8 * block);
}

Range unit_range(const Packed& p, uint64_t unit) {
  const Range r{p.unit_offset(unit), p.unit_offset(unit + 1)};
  if (r.begin >= r.end || r.end > p.header.used_bytes)
    fail("packed: the index says unit ", unit, " is at bytes ", r.begin, " to ", r.end, ", the tensor has ",
         p.header.used_bytes);
  return r;
}

void check_sections(const Packed& p) {
  const Header& h = p.header;
  // The stored checksum sits in words 4 and 5 and was summed as zero.
  const uint64_t stored = h.header_checksum;
  const uint64_t sum = checksum(p.bytes, h.data_offset) - (kFirstWordWeight + 4) * (stored & 0xFFFFFFFF) -
                       (kFirstWordWeight + 5) * (stored >> 32);
  if (sum != stored) fail("packed: the header's checksum is ", sum, ", expected ", stored, ": the bytes are damaged");
  uint64_t code_end = kHeaderBytes;
  if (h.longest_code) {
    const Code code = read_code(p.bytes + kHeaderBytes, h.index_offset - kHeaderBytes, h.longest_code);
    code_end += code.bytes();
    // A kernel keeps its table while the id stays the same.
    if (code.id() != h.code_id)
      fail("packed: header field code id is ", h.code_id, ", expected ", code.id(), ", that of the code table");
  } else {
    check_field("code id", h.code_id, 0u);
  }
  for (uint64_t unit = 0; unit < h.units(); unit++) unit_range(p, unit);
  check_zero(p.bytes, code_end, h.index_offset, "padding after the code table");
  check_zero(p.bytes, h.index_offset + 4 * (h.units() + 1), h.checksums_offset, "padding after the index");
  check_zero(p.bytes, h.checksums_offset + 8 * h.blocks(), h.data_offset, "padding before the data");
}

void check_header(const Packed& p, size_t size) {
  check_sections(p);
  check_zero(p.bytes, p.header.used_bytes, size, "padding after the data");
}

void check_block(const Packed& p, uint64_t block, Checksum checksum_of) {
  const uint64_t begin = unit_range(p, p.first_unit(block)).begin;
  const uint64_t end = p.unit_offset(p.first_unit(block + 1));
  if (end <= begin || end > p.header.used_bytes)
    fail("packed: the index says block ", block, " is at bytes ", begin, " to ", end, ", the tensor has ",
         p.header.used_bytes);
  check_block_sum(p, block, checksum_of(p.bytes + begin, end - begin));
}

void check_block_sum(const Packed& p, uint64_t block, uint64_t sum) {
  const uint64_t stored = p.block_checksum(block);
  if (sum != stored)
    fail("packed: the checksum of ", p.header.tiled() ? "row block " : "chunk ", block, " (from byte ",
         p.unit_offset(p.first_unit(block)), ") is ", sum, ", expected ", stored, ": the bytes are damaged");
}

}  // namespace unweight
