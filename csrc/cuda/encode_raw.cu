// Writes raw stages: registers as they are (docs/FORMAT.md section 5).
#include "encode/tile.cuh"

namespace unweight::cuda {

// A CTA a stage. Reads the fields for writing.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_write_raw(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const StagePlace at(a.band);
  const BandMatrix matrix(a, at.matrix);
  fill_tile(tiles[warp], warp_rows(a.band, matrix, at.block, at.stage, warp), {0, false}, lane);
  write_raw_warp(tiles[warp], matrix.stage(at.unit), warp, lane);
}

}  // namespace unweight::cuda
