// Packed matrices to another layout, on the device: the same bytes as csrc/cpu/pack.cpp makes, and no copy of the
// tensor in BF16. Torch-free, CUDA-free.
#pragma once
#include <cstdint>
#include <vector>

#include "../format/packing.h"
#include "encode.h"
#include "plan.h"

namespace unweight::cuda {

// BF16 scratch that a transcoder takes, unless a single chunk of the matrix needs more.
constexpr uint64_t kTranscodeScratch = uint64_t{64} << 20;

// The same rows of one or more matrices, which lie in scratch together.
struct BandRows {
  uint32_t matrix, matrices;
  RowRange rows;
};

// Cuts a stack into bands of whole groups of `group` rows: all matrices together if there is room for `most` weights,
// else as many whole matrices as have, else parts of one; at least one group.
std::vector<BandRows> cut_bands(uint32_t matrices, uint64_t out_features, uint64_t in_features, uint64_t group,
                                uint64_t most);

// Transcodes in two steps, so that the caller can allocate the result: its size depends on the data. `archive` is read,
// not written: it is a layout for disks.
class Transcoder {
 public:
  // `stacked` rounds matrices up to 128 bytes. Falls back to another layout as docs/FORMAT.md section 9 says. Checks
  // all that `verify` checks. Waits for the device. Throws Error. `device` must live as long as this does.
  Transcoder(Device& device, const PackedMatrices& from, Layout wanted, bool stacked,
             uint64_t scratch_bytes = kTranscodeScratch);

  Layout layout() const { return packing_.layout; }
  int64_t row_bytes() const { return row_bytes_; }
  // Writes matrices · out_features · row_bytes() bytes; `out` is a multiple of 128.
  void write(DeviceAddress out);

 private:
  void open(Layout wanted);
  void decode(const BandRows& band);
  template <class Task>
  void for_each_band(Task task);  // task(band), its rows in scratch
  EncodeArgument argument(const BandRows& band) const;
  PairCounts count(bool complete_halves);
  bool encode(Layout layout);
  void make_code();
  void read_sizes();
  void make_headers();
  uint64_t units() const { return headers_[0].units(); }

  Device& device_;
  PackedMatrices from_;
  bool stacked_;
  std::vector<int64_t> shape_;
  std::vector<BandRows> bands_;
  size_t decoded_;        // the band that lies in scratch, or bands_.size()
  bool checked_ = false;  // every checksum
  DeviceAddress rows_ = 0, sums_ = 0, status_ = 0, counts_ = 0, codes_ = 0, sizes_ = 0, misfits_ = 0;

  Packing packing_;
  std::vector<PackedParts> parts_;  // of each matrix
  std::vector<Header> headers_;
  int64_t row_bytes_ = 0;
};

// The launches.
LaunchPlan plan_count(const CountArgument& argument, int multiprocessors);
LaunchPlan plan_size_huffman(const EncodeArgument& argument);
LaunchPlan plan_size_nibble(const EncodeArgument& argument);
LaunchPlan plan_write(Layout layout, const EncodeArgument& argument);
// Fills in `pieces`.
LaunchPlan plan_sum_blocks(SumArgument argument, int multiprocessors);

}  // namespace unweight::cuda
