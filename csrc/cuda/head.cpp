#include "head.h"

#include <algorithm>

#include "../format/code.h"

namespace unweight::cuda {
namespace {

// More than any valid header needs, so that a damaged one can't ask for a copy of the whole tensor.
constexpr size_t kMostBytes = size_t{64} << 20;
static_assert(kMostBytes > kHeaderBytes + kCodeCountBytes + 2 * kPairs + (4 + 8) * (kMaxStages + 1) + 256);

std::vector<uint8_t> read_head(Device& device, DeviceAddress matrix, size_t size) {
  std::vector<uint8_t> bytes(std::min(size, kHeaderBytes + kCodeCountBytes));
  device.download(bytes.data(), matrix, bytes.size());
  if (bytes.size() < kHeaderBytes) return bytes;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  const size_t read = bytes.size();
  const size_t wanted = std::min<uint64_t>({header.data_offset, size, kMostBytes});
  if (wanted > read) {
    bytes.resize(wanted);
    device.download(bytes.data() + read, matrix + read, wanted - read);
  }
  return bytes;
}

}  // namespace

// open_packed compares data_offset with what follows from the other fields before it reads anything in between.
Head::Head(Device& device, DeviceAddress matrix, size_t size)
    : bytes_(read_head(device, matrix, size)), packed_(open_packed(bytes_.data(), size)) {}

}  // namespace unweight::cuda
