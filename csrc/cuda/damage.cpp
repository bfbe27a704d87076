// The status word in the CPU's words.
#include <algorithm>
#include <vector>

#include "../format/checksum.h"
#include "../format/code.h"
#include "../format/error.h"
#include "plan.h"
#include "status.h"

namespace unweight::cuda {
namespace {

// The parts before the data of one matrix, brought to the host, where the CPU says what it says of them.
class Beginning {
 public:
  Beginning(Device& device, const PackedMatrices& packed) : device_(device), packed_(packed) {
    const PackedArgument a = packed_argument(packed);
    if (a.matrix_bytes >= kHeaderBytes) check_shape();
    constexpr uint64_t kLargestCode = kCodeCountBytes + 2 * 16 * 65535, kGaps = 256;
    const uint64_t units = std::max<uint64_t>(a.chunks, uint64_t{a.blocks} * a.stages_per_block);
    const uint64_t most = kHeaderBytes + kLargestCode + kGaps + 4 * (units + 1) + 8 * uint64_t{a.blocks};
    bytes_.resize(std::min(a.matrix_bytes, most));
    device.download(bytes_.data(), packed.address, bytes_.size());
  }

  void explain() const { check_sections(open_packed(bytes_.data(), packed_.matrix_bytes)); }

  void explain_checksum(uint64_t block) const {
    const Packed opened = open_packed(bytes_.data(), packed_.matrix_bytes);
    const uint64_t begin = opened.unit_offset(opened.first_unit(block));
    std::vector<uint8_t> data(opened.unit_offset(opened.first_unit(block + 1)) - begin);
    device_.download(data.data(), packed_.address + begin, data.size());
    check_block_sum(opened, block, checksum(data.data(), data.size()));
  }

 private:
  // The rest is only found at its place if the header means the shape that the host means.
  void check_shape() const {
    Header header;
    device_.download(&header, packed_.address, sizeof header);
    if (header.version != kFormatVersion || header.layout > Layout::kArchive) return;  // said by `explain`
    if (header.out_features != packed_.out_features)
      fail("packed_w: its shape says ", packed_.out_features, " out_features, its header ", header.out_features);
    if (header.in_features != packed_.in_features)
      fail("in_features: ", packed_.in_features, ", expected ", header.in_features, ", the in_features of packed_w");
  }

  Device& device_;
  const PackedMatrices& packed_;
  std::vector<uint8_t> bytes_;
};

[[noreturn]] void fail_on_byte(Device& device, const PackedMatrices& packed, uint64_t at) {
  uint8_t byte = 0;
  device.download(&byte, packed.address + at, 1);
  fail("packed: byte ", at, " (padding after the data) is ", int{byte}, ", expected 0");
}

}  // namespace

void raise_damage(Device& device, const PackedMatrices& packed, DeviceAddress status) {
  uint64_t word = 0;
  device.download(&word, status, sizeof word);
  const Damage damage = read_status(word);
  if (damage.flaw == Flaw::kNone) return;
  const uint64_t place = damage.place, stage = place / kWarps, warp = place % kWarps;
  const char* damaged = ": the bytes are damaged";
  if (damage.flaw == Flaw::kId) fail("ids: element ", place, " is outside 0 to ", packed.out_features - 1);

  const PackedMatrices matrix = packed.matrix(std::min(damage.matrix, packed.matrices - 1));
  if (damage.flaw <= Flaw::kBlockChecksum) {
    const Beginning beginning(device, matrix);
    beginning.explain();
    if (damage.flaw == Flaw::kBlockChecksum) beginning.explain_checksum(place);
  }
  switch (damage.flaw) {
    case Flaw::kLayout:
      fail("layout: ", layout_name(static_cast<Layout>(packed.layout)), ", but matrix ", damage.matrix, " is ",
           layout_name(static_cast<Layout>(place)));
    case Flaw::kGap: fail_on_byte(device, matrix, place);
    case Flaw::kIndex:
      fail("packed: the index gives stage ", place,
           " a place outside the data, or one too small for its signs and mantissas", damaged);
    case Flaw::kBlockChecksum:
      fail("packed: the checksum of block or chunk ", place, " is not the one that the device found", damaged);
    case Flaw::kRawStage:
      fail("packed: stage ", place, " says that it is raw, but is shorter than the ", kRawStageBytes,
           " bytes of a raw stage", damaged);
    case Flaw::kSection: fail("packed: stage ", stage, ", warp ", warp, ": its patches are outside the stage", damaged);
    case Flaw::kPatches:
      fail("packed: stage ", stage, ", warp ", warp, ": its patches don't belong to the k-steps that its header names",
           damaged);
    case Flaw::kChunk: fail("packed: the patches and words of chunk ", place, " don't fill it", damaged);
    case Flaw::kChunkPatch: fail("packed: chunk ", place, ": its patches are outside it or out of order", damaged);
    default: fail("packed: the header of matrix ", damage.matrix, " is damaged");
  }
}

}  // namespace unweight::cuda
