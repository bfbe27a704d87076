#include "transcode.h"

#include <algorithm>

#include "../format/error.h"
#include "grid.h"

namespace unweight::cuda {
namespace {

constexpr size_t kCountsBytes = 8 * size_t{kPairs};

uint64_t section_sizes(const StageSize& size) {
  uint64_t bytes = 0;
  for (const WarpSize& w : size.warps) bytes += w.section_bytes();
  return bytes;
}

uint32_t stage_steps(Layout layout, const StageSize& size) {
  if (size.warps[0].raw()) return kRawStageBytes / 16;
  const uint64_t sections = layout == Layout::kNibble ? kNibbleSections : kHuffmanSections;
  return static_cast<uint32_t>(ceil_div(sections + section_sizes(size), 16));
}

}  // namespace

std::vector<BandRows> cut_bands(uint32_t matrices, uint64_t out_features, uint64_t in_features, uint64_t group,
                                uint64_t most) {
  std::vector<BandRows> bands;
  const uint64_t together = most / (out_features * in_features);
  if (together >= 1) {
    const auto step = static_cast<uint32_t>(std::min<uint64_t>(together, matrices));
    for (uint32_t m = 0; m < matrices; m += step) bands.push_back({m, std::min(step, matrices - m), {0, out_features}});
    return bands;
  }
  const uint64_t step = std::max<uint64_t>(most / (group * in_features), 1) * group;
  for (uint32_t m = 0; m < matrices; m++)
    for (uint64_t first = 0; first < out_features; first += step)
      bands.push_back({m, 1, {first, std::min(step, out_features - first)}});
  return bands;
}

Transcoder::Transcoder(Device& device, const PackedMatrices& from, Layout wanted, bool stacked, uint64_t scratch_bytes)
    : device_(device), from_(from), stacked_(stacked) {
  if (wanted > Layout::kNibble)
    fail("layout: ", layout_name(wanted),
         " is not written on a GPU, allowed are raw, huffman, nibble: move packed_w to "
         "the CPU first");
  open(wanted);
  bands_ = cut_bands(from_.matrices, from_.out_features, from_.in_features, group_rows(from_),
                     scratch_bytes / sizeof(uint16_t));
  decoded_ = bands_.size();
  uint64_t most = 0;
  for (const BandRows& b : bands_) most = std::max(most, b.matrices * b.rows.count * from_.in_features);
  rows_ = device_.allocate(sizeof(uint16_t) * most, "decoded rows");
  // Damaged stages leave their rows as they were, and the first sweep ends before it asks whether there were any.
  device_.clear(rows_, sizeof(uint16_t) * most);

  if (!encode(wanted)) encode(Layout::kHuffman);
  make_headers();
  if (packing_.layout != Layout::kRaw && raw_is_no_larger(headers_)) {
    encode(Layout::kRaw);
    make_headers();
  }
  row_bytes_ = common_row_bytes(headers_, stacked_);
}

// Everything that is known before a weight is decoded.
void Transcoder::open(Layout wanted) {
  check_packable(from_.matrices, from_.out_features, from_.in_features);
  status_ = device_.allocate(sizeof(uint64_t), "status");
  sums_ = device_.allocate(sums_bytes(from_), "checksums");
  device_.clear(status_, sizeof(uint64_t));
  device_.clear(sums_, sums_bytes(from_));
  verify_headers(device_, from_, sums_, status_);
  raise_damage(device_, from_, status_);

  Header first{};
  for (uint32_t m = 0; m < from_.matrices; m++) {
    Header h;
    device_.download(&h, from_.address + m * from_.matrix_bytes, sizeof h);
    if (m == 0) first = h;
    if (h.layout != first.layout)
      fail("packed: matrix ", m, " is ", layout_name(h.layout), " of ", h.out_features, " x ", h.in_features,
           ", matrix 0 is ", layout_name(first.layout), " of ", first.out_features, " x ", first.in_features);
  }
  shape_.assign(first.shape, first.shape + std::min<int>(first.rank, kMaxRank));
  from_.layout = static_cast<int>(first.layout);

  Header to{};
  to.layout = Layout::kRaw;
  to.out_features = from_.out_features;
  to.in_features = from_.in_features;
  sizes_ =
      wanted == Layout::kRaw ? 0 : device_.allocate(sizeof(StageSize) * from_.matrices * to.units(), "stage sizes");
}

void Transcoder::decode(const BandRows& band) {
  PackedMatrices from = from_.matrix(band.matrix);
  from.matrices = band.matrices;
  const uint64_t first_sum = band.matrix * (sums_bytes(from_) / from_.matrices);
  unpack_rows(device_, from, band.rows, rows_, checked_ ? 0 : sums_ + first_sum, status_);
}

template <class Task>
void Transcoder::for_each_band(Task task) {
  for (size_t b = 0; b < bands_.size(); b++) {
    if (decoded_ != b) decode(bands_[b]);
    decoded_ = b;
    task(bands_[b]);
  }
  if (checked_) return;
  // Nothing is made of damaged weights.
  compare_checksums(device_, from_, sums_, status_);
  raise_damage(device_, from_, status_);
  checked_ = true;
}

PairCounts Transcoder::count(bool complete_halves) {
  if (!counts_) counts_ = device_.allocate(kCountsBytes, "pair counts");
  device_.clear(counts_, kCountsBytes);
  for_each_band([&](const BandRows& band) {
    CountArgument a{};
    a.rows = rows_;
    a.row_count = band.matrices * band.rows.count;
    a.in_features = from_.in_features;
    a.counts = counts_;
    a.complete_halves = complete_halves;
    device_.launch(plan_count(a, device_.multiprocessors()));
  });
  std::vector<uint64_t> counts(kPairs);
  device_.download(counts.data(), counts_, kCountsBytes);
  PairCounts pairs;
  for (uint32_t second = 0; second < 256; second++) {
    uint64_t row[256];
    std::copy_n(counts.data() + 256 * second, 256, row);
    if (std::any_of(row, row + 256, [](uint64_t n) { return n > 0; })) pairs.add(second, row);
  }
  return pairs;
}

void Transcoder::make_code() {
  packing_.code = build_code(count(/*complete_halves=*/true), 8);
  const std::vector<uint32_t> entries = packing_.code.encode_table();
  if (!codes_) codes_ = device_.allocate(sizeof(uint32_t) * entries.size(), "codes by pair");
  device_.upload(codes_, entries.data(), sizeof(uint32_t) * entries.size());
}

EncodeArgument Transcoder::argument(const BandRows& band) const {
  Header to{};
  to.layout = packing_.layout;
  to.out_features = from_.out_features;
  to.in_features = from_.in_features;
  EncodeArgument a{};
  a.band.rows = rows_;
  a.band.row_count = band.rows.count;
  a.band.in_features = from_.in_features;
  a.band.stages_per_matrix = to.units();
  a.band.stages_per_block = static_cast<uint32_t>(to.stages_per_block());
  a.band.first_stage = band.rows.first / kBlockRows * to.stages_per_block();
  a.band.segment_stages = static_cast<uint32_t>(segment_stages(to.out_features, to.in_features));
  a.band.matrices = band.matrices;
  a.sizes = sizes_ + sizeof(StageSize) * band.matrix * to.units();
  a.codes = codes_;
  a.misfits = misfits_;
  if (packing_.layout == Layout::kHuffman) a.padding_pair = padding_pair(packing_.code);
  a.nibble_base = static_cast<uint32_t>(packing_.nibble_base);
  return a;
}

// Sizes the stages. False if the weights don't fit the layout.
bool Transcoder::encode(Layout layout) {
  packing_ = Packing{layout, 0, {}};
  if (layout == Layout::kRaw) {
    Header to{};
    to.layout = Layout::kRaw;
    to.out_features = from_.out_features;
    to.in_features = from_.in_features;
    parts_.assign(from_.matrices, {std::vector<uint32_t>(to.units(), kRawStageBytes / 16), 0});
    return true;
  }
  if (layout == Layout::kHuffman) {
    make_code();
    for_each_band([&](const BandRows& band) { device_.launch(plan_size_huffman(argument(band))); });
    read_sizes();
    return true;
  }
  packing_.nibble_base = best_nibble_base(count(/*complete_halves=*/false));
  uint32_t misfits = 0;
  misfits_ = device_.allocate(sizeof misfits, "misfits");
  device_.clear(misfits_, sizeof misfits);
  for_each_band([&](const BandRows& band) { device_.launch(plan_size_nibble(argument(band))); });
  device_.download(&misfits, misfits_, sizeof misfits);
  if (misfits) return false;
  read_sizes();
  return std::all_of(parts_.begin(), parts_.end(), [&](const PackedParts& p) {
    return few_enough_patches(p.patches, from_.out_features, from_.in_features);
  });
}

void Transcoder::read_sizes() {
  const uint64_t units = argument(bands_[0]).band.stages_per_matrix;
  std::vector<StageSize> sizes(units);
  parts_.assign(from_.matrices, {});
  for (uint32_t m = 0; m < from_.matrices; m++) {
    device_.download(sizes.data(), sizes_ + sizeof(StageSize) * m * units, sizeof(StageSize) * units);
    for (const StageSize& size : sizes) {
      parts_[m].unit_steps.push_back(stage_steps(packing_.layout, size));
      for (const WarpSize& w : size.warps) parts_[m].patches += w.patches();
    }
  }
}

void Transcoder::make_headers() {
  headers_.clear();
  for (const PackedParts& p : parts_)
    headers_.push_back(make_header(packing_, from_.out_features, from_.in_features, shape_, p));
}

void Transcoder::write(DeviceAddress out) {
  if (out % 128) fail("out: lies ", out % 128, " bytes behind a multiple of 128 in memory, expected 0");
  const uint64_t stride = static_cast<uint64_t>(row_bytes_) * from_.out_features;
  // One code and one shape: these are the same in all matrices.
  const uint64_t data_offset = headers_[0].data_offset, checksums_offset = headers_[0].checksums_offset;
  const uint64_t blocks = headers_[0].blocks();
  std::vector<uint8_t> head(data_offset);
  const std::vector<uint64_t> nothing(blocks, 0);
  for (uint32_t m = 0; m < from_.matrices; m++) {
    write_head(headers_[m], packing_, parts_[m], nothing, head.data());
    device_.upload(out + m * stride, head.data(), data_offset);
    device_.clear(out + m * stride + headers_[m].used_bytes, stride - headers_[m].used_bytes);
  }

  for_each_band([&](const BandRows& band) {
    EncodeArgument a = argument(band);
    a.packed = out + band.matrix * stride;
    a.matrix_bytes = stride;
    a.index_offset = headers_[0].index_offset;
    a.data_offset = data_offset;
    device_.launch(plan_write(packing_.layout, a));
  });

  SumArgument sum{};
  sum.packed = out;
  sum.matrix_bytes = stride;
  sum.index_offset = headers_[0].index_offset;
  sum.checksums_offset = checksums_offset;
  sum.data_offset = data_offset;
  sum.matrices = from_.matrices;
  sum.blocks = static_cast<uint32_t>(blocks);
  sum.stages_per_block = static_cast<uint32_t>(headers_[0].stages_per_block());
  device_.launch(plan_sum_blocks(sum, device_.multiprocessors()));

  // The header's own checksum covers those of the blocks.
  std::vector<uint64_t> checksums(blocks);
  for (uint32_t m = 0; m < from_.matrices; m++) {
    device_.download(checksums.data(), out + m * stride + checksums_offset, 8 * blocks);
    write_head(headers_[m], packing_, parts_[m], checksums, head.data());
    device_.upload(out + m * stride, head.data(), kHeaderBytes);
  }
}

}  // namespace unweight::cuda
