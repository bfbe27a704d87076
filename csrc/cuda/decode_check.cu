// Instantiates the decode headers in small kernels, so that the build compiles them for Hopper as long as no real
// kernel does, and ptxas says what they cost (tools/check_cubin.py). Never launched, no part of the extension.
#include "decode/huffman.cuh"
#include "decode/nibble.cuh"

namespace unweight {

// codes: a word a lane and k-step; planes: S0 and S1 of it; fragments: its four A registers.
__global__ void check_nibble(const uint32_t* codes, const uint2* planes, uint4* fragments, int ksteps) {
  for (int k = 0; k < ksteps; k++) {
    const int i = kLanes * k + threadIdx.x;
    const uint2 s = planes[i];
    uint32_t a[kRegisters];
    decode_nibbles(codes[i], s.x, s.y, a);
    fragments[i] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// One warp. `table` has 256 entries; a copy per lane lies in a bank of its own.
__global__ void check_huffman(const uint32_t* table, const uint32_t* words, const uint2* planes, uint4* fragments,
                              int ksteps) {
  __shared__ uint32_t entries[256 * kLanes];  // (256, kLanes)
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < 256 * kLanes; i += kLanes) entries[i] = table[i / kLanes];
  __syncwarp();

  const auto* column = reinterpret_cast<const char*>(entries) + 4 * lane;
  const auto lookup = [column](uint32_t x) {
    return *reinterpret_cast<const uint32_t*>(column + dot4(x, 0x80000000u, 0));  // a row is 128 bytes
  };
  BitStream stream{words[lane], words[kLanes + lane], 0};
  words += 2 * kLanes;
  for (int k = 0; k < ksteps; k++) {
    uint32_t exponents[kRegisters], a[kRegisters];
    const bool wants = decode_four_codes(stream, lookup, exponents);
    const uint32_t takers = __ballot_sync(0xFFFFFFFFu, wants);
    // Words lie in the order in which the warp takes them.
    if (wants) refill(stream, words[__popc(takers & ((1u << lane) - 1))]);
    words += __popc(takers);
    const uint2 s = planes[kLanes * k + lane];
    merge_entries(exponents, s.x, s.y, a);
    fragments[kLanes * k + lane] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

}  // namespace unweight
