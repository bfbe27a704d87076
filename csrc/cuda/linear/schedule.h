// How the work of one launch is dealt out to its CTAs: plain arithmetic, the same for all who ask.
//
// A unit is one segment of one block. Units follow each other by weight, tile (of tokens, of one matrix after the
// other), group of blocks, segment, block. Each costs its stages. CTA c of C gets those between the unit borders
// nearest to c/C and (c+1)/C of the whole cost: contiguous, so that a block is cut only where a CTA's part begins or
// ends.
#pragma once
#include "../../format/tile.h"
#include "arguments.h"

namespace unweight::cuda {

UNWEIGHT_HD constexpr uint32_t ceil_quotient(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

// A matrix as its work is counted.
struct WorkShape {
  uint32_t blocks, stages;  // stages of each block
  uint32_t segment_stages;  // of each segment but perhaps the last
  uint32_t warpgroups;      // blocks of a group

  UNWEIGHT_HD_MEMBER uint32_t cost() const { return blocks * stages; }  // at most 2^21: docs/FORMAT.md section 2
  UNWEIGHT_HD_MEMBER uint32_t segments() const { return ceil_quotient(stages, segment_stages); }
  UNWEIGHT_HD_MEMBER uint32_t units() const { return blocks * segments(); }
  UNWEIGHT_HD_MEMBER uint32_t group_units() const { return warpgroups * segments(); }  // of all but the last
  UNWEIGHT_HD_MEMBER uint32_t stages_of(uint32_t segment) const {
    const uint32_t left = stages - segment * segment_stages;
    return left < segment_stages ? left : segment_stages;
  }
  UNWEIGHT_HD_MEMBER uint32_t width(uint32_t group) const {  // blocks of a group
    const uint32_t left = blocks - group * warpgroups;
    return left < warpgroups ? left : warpgroups;
  }
  // The unit that begins nearest to a stage, both counted from the matrix's first; stage < cost().
  UNWEIGHT_HD_MEMBER uint32_t nearest_unit(uint32_t stage) const {
    const uint32_t group = stage / (warpgroups * stages), blocks = width(group);
    stage -= group * warpgroups * stages;
    const uint32_t segment = stage / (blocks * segment_stages), length = stages_of(segment);
    stage -= segment * blocks * segment_stages;
    return group * group_units() + segment * blocks + (stage + length / 2) / length;
  }
};

// Units [begin, end) of a group: what one CTA does of it. Its warpgroups go from segment to segment together.
struct GroupWork {
  uint32_t group, width;
  uint32_t begin, end;

  UNWEIGHT_HD_MEMBER uint32_t first_segment() const { return begin / width; }
  UNWEIGHT_HD_MEMBER uint32_t end_segment() const { return ceil_quotient(end, width); }
  // Segments of the group's block `b` (any number; none from `width` on).
  UNWEIGHT_HD_MEMBER uint32_t begin_of(uint32_t b) const { return b < width ? segments_before(begin, b) : 0; }
  UNWEIGHT_HD_MEMBER uint32_t end_of(uint32_t b) const { return b < width ? segments_before(end, b) : 0; }
  UNWEIGHT_HD_MEMBER bool whole(const WorkShape& shape) const { return begin == 0 && end == width * shape.segments(); }

 private:
  UNWEIGHT_HD_MEMBER uint32_t segments_before(uint32_t unit, uint32_t b) const {
    return unit > b ? ceil_quotient(unit - b, width) : 0;
  }
};

// A place in the sequence: a stage of a weight's tile.
struct WorkPlace {
  uint32_t weight, tile, stage;
};

// Place number `stage` of all; `costs` of one tile of each weight. The end is the weight behind the last.
template <class Costs>
UNWEIGHT_HD WorkPlace place_of(uint64_t stage, const Costs& costs, uint32_t weights, uint32_t tiles) {
  for (uint32_t w = 0; w < weights; w++) {
    const uint64_t cost = costs(w);
    if (stage < cost * tiles) return {w, static_cast<uint32_t>(stage / cost), static_cast<uint32_t>(stage % cost)};
    stage -= cost * tiles;
  }
  return {weights, 0, 0};
}

// A CTA's part, tile by tile.
struct WorkCursor {
  WorkPlace at, end;
  uint32_t tiles;

  template <class Costs>
  UNWEIGHT_HD_MEMBER WorkCursor(uint32_t cta, uint32_t ctas, const Costs& costs, uint32_t weights, uint32_t tiles)
      : tiles(tiles) {
    uint64_t total = 0;
    for (uint32_t w = 0; w < weights; w++) total += uint64_t{costs(w)} * tiles;
    at = place_of(total * cta / ctas, costs, weights, tiles);
    end = place_of(total * (cta + 1) / ctas, costs, weights, tiles);
  }
  UNWEIGHT_HD_MEMBER bool in_last() const { return at.weight == end.weight && at.tile == end.tile; }
  UNWEIGHT_HD_MEMBER bool done() const {
    if (at.weight != end.weight) return at.weight > end.weight;
    return at.tile != end.tile ? at.tile > end.tile : at.stage >= end.stage;
  }
  UNWEIGHT_HD_MEMBER void next() {
    at.stage = 0;
    if (++at.tile < tiles) return;
    at.tile = 0;
    at.weight++;
  }
  // Calls visit(GroupWork) for the groups of the tile at hand, whose matrix has this shape.
  template <class Visit>
  UNWEIGHT_HD_MEMBER void for_each_group(const WorkShape& shape, Visit visit) const {
    uint32_t unit = at.stage ? shape.nearest_unit(at.stage) : 0;
    const uint32_t last = in_last() ? shape.nearest_unit(end.stage) : shape.units();
    while (unit < last) {
      const uint32_t group = unit / shape.group_units(), first = group * shape.group_units();
      const uint32_t width = shape.width(group), units = width * shape.segments();
      const uint32_t stop = last - first < units ? last - first : units;
      visit(GroupWork{group, width, unit - first, stop});
      unit = first + stop;
    }
  }
};

}  // namespace unweight::cuda
