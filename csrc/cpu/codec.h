// The codec on a CPU: torch-free. Weights are BF16 bits, row-major.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../format/header.h"

namespace unweight {

// Runs task(0) … task(n - 1) on the caller's threads, in any order. An exception of a task reaches the caller.
using Parallel = std::function<void(int64_t n, const std::function<void(int64_t)>& task)>;

enum class Capability : int { kPortable = 0, kAvx512 = 1 };
// The one in force: the best that this CPU has, or what UNWEIGHT_CPU=portable or `set_capability` lowered it to.
Capability capability();
void set_capability(Capability wanted);

// Rows of weights that are to be packed: `matrices` matrices of [out_features, in_features], in memory or decoded as
// they are needed.
class RowSource {
 public:
  int64_t matrices, out_features, in_features;

  RowSource(int64_t matrices, int64_t out_features, int64_t in_features)
      : matrices(matrices), out_features(out_features), in_features(in_features) {}
  virtual ~RowSource() = default;
  // Calls must ask for whole groups of this many rows (the last one what is left).
  virtual int64_t group_rows() const { return kBlockRows; }
  // How many weights of scratch so many rows need.
  virtual size_t scratch_weights(int64_t) const { return 0; }
  // Rows [first, first + count) of a matrix, one behind the other: `scratch` or memory of the source's own.
  virtual const uint16_t* rows(int64_t matrix, int64_t first, int64_t count, uint16_t* scratch) const = 0;
};

// BF16 bits in memory.
std::unique_ptr<RowSource> weights_in_memory(const uint16_t* data, int64_t matrices, int64_t out_features,
                                             int64_t in_features);
// Packed matrices, `bytes_per_matrix` apart: for transcoding without a copy of the tensor. Checks every checksum.
std::unique_ptr<RowSource> packed_weights(const uint8_t* bytes, size_t bytes_per_matrix, int64_t matrices);

// Packs in two steps, so that the caller can allocate the result: its size depends on the data.
class Packer {
 public:
  // `shape`: of one matrix as the caller knows it, 2 to 8 entries. `stacked` rounds matrices up to 128 bytes.
  // Falls back to another layout as docs/FORMAT.md section 9 says.
  // `source` must live as long as this does.
  Packer(const RowSource& source, Layout wanted, const std::vector<int64_t>& shape, bool stacked,
         const Parallel& parallel);
  ~Packer();
  int64_t row_bytes() const;
  // Writes matrices · out_features · row_bytes() bytes.
  void write(uint8_t* out, const Parallel& parallel) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// All of these throw Error on damaged bytes; none reads outside [bytes, bytes + size).

// Decodes one matrix to out_features · in_features weights, checking every checksum.
void unpack(const uint8_t* bytes, size_t size, uint16_t* out, const Parallel& parallel);

// Checks everything `unpack` checks, without the weights.
void verify(const uint8_t* bytes, size_t size, const Parallel& parallel);

// Decodes one 64-row block or archive chunk, without checking its checksum: for products and look-ups in an archive.
void unpack_block(const Packed& packed, size_t size, uint64_t block, uint16_t* out);

// Copies one packed matrix of `size` bytes to `out_size` bytes: zeros are added at its end, or cut off.
void resize(const uint8_t* bytes, size_t size, uint8_t* out, size_t out_size, const Parallel& parallel);

}  // namespace unweight
