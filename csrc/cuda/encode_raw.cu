// Writes raw stages: registers as they are (docs/FORMAT.md section 5).
#include "encode/tile.cuh"

namespace unweight::cuda {

// A CTA a stage. Reads the fields for writing.
extern "C" __global__ void __launch_bounds__(kEncodeThreads)
    unweight_write_raw(const __grid_constant__ EncodeArgument a) {
  __shared__ WarpTile tiles[kWarps];
  const StageWarp w(a, tiles);
  write_raw_warp(w.tile, w.matrix.stage(w.at.unit), w.warp, w.lane);
}

}  // namespace unweight::cuda
