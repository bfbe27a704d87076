// One warp's part of a stage on its way from rows to A registers: 16 rows x 128 columns in shared memory.
#pragma once
#include "../decode/bits.cuh"
#include "../encode.h"

namespace unweight::cuda {

constexpr int kTileRowWords = kStageColumns / 2;
// Four words more than a row has: then the 8 rows x 4 words that a warp's registers come from lie in 32 banks.
struct WarpTile {
  uint4 rows[kWarpRows][kTileRowWords / 4 + 1];
};

// One matrix of a band. Stages are counted from the band's first.
struct BandMatrix {
  const uint16_t* rows;
  WarpSize* sizes;  // (stages, kWarps)
  const uint32_t* index;
  uint8_t* data;  // of the matrix, as the index counts it

  __device__ __forceinline__ BandMatrix(const EncodeArgument& a, uint64_t matrix)
      : rows(reinterpret_cast<const uint16_t*>(a.band.rows) + matrix * a.band.row_count * a.band.in_features),
        sizes(reinterpret_cast<WarpSize*>(a.sizes) +
              (matrix * a.band.stages_per_matrix + a.band.first_stage) * kWarps) {
    auto* packed = reinterpret_cast<uint8_t*>(a.packed) + matrix * a.matrix_bytes;
    index = reinterpret_cast<const uint32_t*>(packed + a.index_offset) + a.band.first_stage;
    data = packed + a.data_offset;
  }

  __device__ __forceinline__ uint8_t* stage(uint32_t s) const { return data + 16 * uint64_t{index[s]}; }
};

// The stage of a CTA that has one.
struct StagePlace {
  uint32_t matrix, unit, block, stage;  // `unit` in the band, `stage` in the block
  __device__ __forceinline__ explicit StagePlace(const Band& band) {
    const uint32_t stages = band.blocks() * band.stages_per_block;
    matrix = blockIdx.x / stages;
    unit = blockIdx.x % stages;
    block = unit / band.stages_per_block;
    stage = unit % band.stages_per_block;
  }
};

// What a warp encodes, as it lies in scratch.
struct WarpRows {
  const uint16_t* weights;  // row 0, column 0 of the warp's part
  uint64_t stride;          // weights from row to row
  int rows, columns;        // how many are weights and no padding: 0…16, 1…128
};

// `block` is counted from the band's first, `stage` from the block's.
__device__ __forceinline__ WarpRows warp_rows(const Band& band, const BandMatrix& matrix, uint32_t block,
                                              uint32_t stage, int warp) {
  const uint64_t row = uint64_t{block} * kBlockRows + warp * kWarpRows;
  const uint64_t column = uint64_t{stage} * kStageColumns;
  const uint64_t rows = row < band.row_count ? band.row_count - row : 0;
  const uint64_t columns = band.in_features - column;
  return {matrix.rows + row * band.in_features + column, band.in_features,
          static_cast<int>(rows < kWarpRows ? rows : kWarpRows),
          static_cast<int>(columns < kStageColumns ? columns : kStageColumns)};
}

// What stands in registers where the matrix has no weights.
struct Padding {
  uint32_t weights;      // of a whole register
  bool complete_halves;  // the second weight of a pair takes the exponent of the first, or 0 for 255; else 0
};

__device__ __forceinline__ uint32_t load_pair(const WarpRows& from, int row, int column, const Padding& padding) {
  if (row >= from.rows || column >= from.columns) return padding.weights;
  const uint16_t* p = from.weights + row * from.stride + column;
  const uint32_t first = p[0];
  if (column + 1 < from.columns) return first | uint32_t{p[1]} << 16;
  const uint32_t exponent = first & 0x7F80;
  return first | (padding.complete_halves && exponent != 0x7F80 ? exponent << 16 : 0);
}

// Ends with the whole warp seeing the tile.
__device__ __forceinline__ void fill_tile(WarpTile& tile, const WarpRows& from, const Padding& padding, int lane) {
  __syncwarp();  // the last user of the tile may still read it
  if (from.stride % 8 == 0) {
    // Rows are 16-byte aligned, and no piece of 8 columns is padding in part.
    const uint4 nothing = make_uint4(padding.weights, padding.weights, padding.weights, padding.weights);
    constexpr int kPieces = kTileRowWords / 4;
#pragma unroll
    for (int i = 0; i < kWarpRows * kPieces / kLanes; i++) {
      const int row = (i * kLanes + lane) / kPieces, piece = lane % kPieces;
      const bool inside = row < from.rows && 8 * piece < from.columns;
      const uint16_t* p = from.weights + row * from.stride + 8 * piece;
      tile.rows[row][piece] = inside ? *reinterpret_cast<const uint4*>(p) : nothing;
    }
  } else {
#pragma unroll 2
    for (int row = 0; row < kWarpRows; row++) {
      auto* words = reinterpret_cast<uint32_t*>(tile.rows[row]);
#pragma unroll
      for (int word = lane; word < kTileRowWords; word += kLanes) words[word] = load_pair(from, row, 2 * word, padding);
    }
  }
  __syncwarp();
}

// What a warp of a CTA that has a stage begins with. The rows are in the warp's tile when it is made; padding is 0.
struct StageWarp {
  int warp, lane;
  StagePlace at;
  BandMatrix matrix;
  WarpRows rows;
  const WarpTile& tile;

  __device__ __forceinline__ StageWarp(const EncodeArgument& a, WarpTile (&tiles)[kWarps])
      : warp(threadIdx.x / kLanes),
        lane(threadIdx.x % kLanes),
        at(a.band),
        matrix(a, at.matrix),
        rows(warp_rows(a.band, matrix, at.block, at.stage, warp)),
        tile(tiles[warp]) {
    fill_tile(tiles[warp], rows, {0, false}, lane);
  }
};

// A lane's A registers of a k-step.
__device__ __forceinline__ void load_registers(const WarpTile& tile, int kstep, int lane,
                                               uint32_t (&registers)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; i++) {
    const auto* row = reinterpret_cast<const uint32_t*>(tile.rows[fragment_row(0, lane, i)]);
    registers[i] = row[fragment_column(kstep, lane, i) / 2];
  }
}

// What a warp writes behind the planes of a stage. Sections of the four warps stand one behind the other.
struct Section {
  uint32_t begin;  // from the start of the stage
  WarpSize size;
  __device__ __forceinline__ uint32_t end() const { return begin + size.section_bytes(); }
};

// `sections`: where the first warp's begins.
__device__ __forceinline__ Section warp_section(const BandMatrix& matrix, uint32_t stage, int warp, uint32_t sections) {
  const uint4 all = reinterpret_cast<const uint4*>(matrix.sizes)[stage];
  const WarpSize sizes[kWarps] = {{all.x}, {all.y}, {all.z}, {all.w}};
  Section section{sections, sizes[0]};
#pragma unroll
  for (int w = 1; w < kWarps; w++) {
    if (w > warp) break;
    section = {section.end(), sizes[w]};
  }
  return section;
}

__device__ __forceinline__ void store_word(uint8_t* bytes, uint32_t at, uint32_t word) {
  *reinterpret_cast<uint32_t*>(bytes + at) = word;
}

// The S words of a k-step pair, which a lane has together.
__device__ __forceinline__ void store_plane(uint8_t* stage, int warp, int kstep_pair, int lane, uint4 words) {
  uint8_t* plane = stage + kStageHeaderBytes + warp * kWarpPlaneBytes;
  reinterpret_cast<uint4*>(plane)[kstep_pair * kLanes + lane] = words;
}

// Zeros from the end of the last section to the next multiple of 16.
__device__ __forceinline__ void store_stage_end(uint8_t* stage, uint32_t end, int lane) {
  const uint32_t at = end + 4 * lane;
  if (at < (end + 15) / 16 * 16) store_word(stage, at, 0);
}

// A raw stage, from a tile whose padding is 0.
__device__ __forceinline__ void write_raw_warp(const WarpTile& tile, uint8_t* stage, int warp, int lane) {
  if (lane == 0) store_word(stage, 4 * warp, kRawWarpHeader);
  auto* out = reinterpret_cast<uint4*>(stage + kStageHeaderBytes + warp * kWarpRawBytes);
#pragma unroll
  for (int k = 0; k < kKSteps; k++) {
    uint32_t r[kRegisters];
    load_registers(tile, k, lane, r);
    out[k * kLanes + lane] = make_uint4(r[0], r[1], r[2], r[3]);
  }
}

}  // namespace unweight::cuda
