// What stands in front of a packed matrix's data, brought from the device to the host.
#pragma once
#include <vector>

#include "../format/header.h"
#include "device.h"

namespace unweight::cuda {

// Header, code table, index and checksums of a packed matrix of `size` bytes, opened (open_packed) but not verified.
// Its Packed reads only in front of the data. Waits for the device; throws Error.
class Head {
 public:
  Head(Device& device, DeviceAddress matrix, size_t size);
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;
  const Packed& packed() const { return packed_; }
  const Header& header() const { return packed_.header; }

 private:
  std::vector<uint8_t> bytes_;
  Packed packed_;
};

}  // namespace unweight::cuda
