// How the work of one launch is dealt out to its CTAs: plain arithmetic, the same for all who ask.
//
// A unit is one segment of one block. Units follow each other by weight, tile (of tokens, of one matrix after the
// other), group of blocks, segment, block. Each costs its stages. Groups are as equal as can be: a warpgroup that is
// alone with a block, while others have none, waits for its own instructions.
//
// A *sheet* is what is cut together: one tile of all weights where a row's sums may not depend on other rows, else
// everything. Chunk c of C of a sheet has the units between the unit borders nearest to c/C and (c+1)/C of its cost:
// contiguous, so that a block is cut only where a chunk begins or ends.
//
// Who has the last segments of a block adds up what all have (gather.cuh). A CTA does a group whose blocks all end with
// it behind all others, of all sheets, so that what it waits for has long been there, and what others wait for comes
// early. (Of a group in which only some do it leaves sums, too: it has to come early.)
#pragma once
#include "../../format/tile.h"
#include "arguments.h"

namespace unweight::cuda {

UNWEIGHT_HD constexpr uint32_t ceil_quotient(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

// A matrix as its work is counted.
struct WorkShape {
  uint32_t blocks, stages;  // stages of each block
  uint32_t segment_stages;  // of each segment but perhaps the last
  uint32_t warpgroups;      // blocks of a group, at most

  UNWEIGHT_HD_MEMBER uint32_t cost() const { return blocks * stages; }  // at most 2^21: docs/FORMAT.md section 2
  UNWEIGHT_HD_MEMBER uint32_t segments() const { return ceil_quotient(stages, segment_stages); }
  UNWEIGHT_HD_MEMBER uint32_t units() const { return blocks * segments(); }
  UNWEIGHT_HD_MEMBER uint32_t stages_of(uint32_t segment) const {
    const uint32_t left = stages - segment * segment_stages;
    return left < segment_stages ? left : segment_stages;
  }
  // As few groups as there can be, and as equal ones: some at the front may have a block more than the others.
  UNWEIGHT_HD_MEMBER uint32_t groups() const { return ceil_quotient(blocks, warpgroups); }
  UNWEIGHT_HD_MEMBER uint32_t width(uint32_t group) const { return blocks / groups() + (group < blocks % groups()); }
  UNWEIGHT_HD_MEMBER uint32_t first_block(uint32_t group) const {
    const uint32_t wide = blocks % groups();
    return group * (blocks / groups()) + (group < wide ? group : wide);
  }
  // That has number `at` of what each block has so many of: units, stages.
  UNWEIGHT_HD_MEMBER uint32_t group_of(uint32_t at, uint32_t each) const {
    const uint32_t width = blocks / groups(), wide = blocks % groups(), behind = wide * (width + 1) * each;
    return at < behind ? at / ((width + 1) * each) : wide + (at - behind) / (width * each);
  }
  // The unit that begins nearest to a stage, both counted from the matrix's first; stage < cost().
  UNWEIGHT_HD_MEMBER uint32_t nearest_unit(uint32_t stage) const {
    const uint32_t group = group_of(stage, stages), blocks = width(group), before = first_block(group);
    stage -= before * stages;
    const uint32_t segment = stage / (blocks * segment_stages), length = stages_of(segment);
    stage -= segment * blocks * segment_stages;
    return before * segments() + segment * blocks + (stage + length / 2) / length;
  }
};

// Units [begin, end) of a group: what one CTA does of it. Its warpgroups go from segment to segment together.
struct GroupWork {
  uint32_t first_block, width;
  uint32_t begin, end;

  UNWEIGHT_HD_MEMBER uint32_t first_segment() const { return begin / width; }
  UNWEIGHT_HD_MEMBER uint32_t end_segment() const { return ceil_quotient(end, width); }
  // Segments of the group's block `b` (any number; none from `width` on).
  UNWEIGHT_HD_MEMBER uint32_t begin_of(uint32_t b) const { return b < width ? segments_before(begin, b) : 0; }
  UNWEIGHT_HD_MEMBER uint32_t end_of(uint32_t b) const { return b < width ? segments_before(end, b) : 0; }
  // Other CTAs began some of its blocks, and all of them end here.
  UNWEIGHT_HD_MEMBER bool is_late(const WorkShape& shape) const { return begin > 0 && end == width * shape.segments(); }

 private:
  UNWEIGHT_HD_MEMBER uint32_t segments_before(uint32_t unit, uint32_t b) const {
    return unit > b ? ceil_quotient(unit - b, width) : 0;
  }
};

// The part of one group in units [unit, end) of a job, of which it takes as many as belong to it.
UNWEIGHT_HD GroupWork take_group(const WorkShape& shape, uint32_t& unit, uint32_t end) {
  const uint32_t group = shape.group_of(unit, shape.segments()), width = shape.width(group);
  const uint32_t first_block = shape.first_block(group), first = first_block * shape.segments();
  const uint32_t units = width * shape.segments(), stop = end - first < units ? end - first : units;
  const GroupWork work{first_block, width, unit - first, stop};
  unit = first + stop;
  return work;
}

// A chunk: from a stage of a job up to a stage of another. A job is a tile of a weight, and those of a sheet follow
// each other by weight, then by tile.
struct WorkShare {
  uint32_t first_job, first_stage;
  uint32_t end_job, end_stage;

  // Of the jobs that may have late groups, or others.
  UNWEIGHT_HD_MEMBER uint32_t jobs_end(bool late) const {
    if (late && first_stage == 0) return first_job;  // nobody began a block of its
    return late && first_job < end_job ? first_job + 1 : end_job + (end_stage != 0);
  }
  // The late units of a job whose matrix has this shape, or the others: [begin, end). There may be none.
  UNWEIGHT_HD_MEMBER void units(uint32_t job, const WorkShape& shape, bool late, uint32_t& begin, uint32_t& end) const {
    begin = job == first_job ? shape.nearest_unit(first_stage) : 0;
    end = job == end_job ? shape.nearest_unit(end_stage) : shape.units();
    uint32_t behind = begin;
    if (begin < end && !take_group(shape, behind, end).is_late(shape)) behind = begin;
    (late ? end : begin) = behind;
  }
};

// Job and stage with which a chunk begins. `costs(w)`: stages of one tile of weight w; `tiles`: of the sheet.
template <class Costs>
UNWEIGHT_HD void find_border(uint32_t chunk, uint32_t chunks, const Costs& costs, uint32_t weights, uint32_t tiles,
                             uint32_t& job, uint32_t& job_stage) {
  uint64_t total = 0;
  for (uint32_t w = 0; w < weights; w++) total += uint64_t{costs(w)} * tiles;
  uint64_t stage = total * chunk / chunks;
  for (uint32_t w = 0; w < weights; w++) {
    const uint64_t cost = costs(w);
    if (stage < cost * tiles) {
      job = w * tiles + static_cast<uint32_t>(stage / cost);
      job_stage = static_cast<uint32_t>(stage % cost);
      return;
    }
    stage -= cost * tiles;
  }
  job = weights * tiles;
  job_stage = 0;
}

template <class Costs>
UNWEIGHT_HD WorkShare share_of(uint32_t chunk, uint32_t chunks, const Costs& costs, uint32_t weights, uint32_t tiles) {
  WorkShare share{};
  find_border(chunk, chunks, costs, weights, tiles, share.first_job, share.first_stage);
  find_border(chunk + 1, chunks, costs, weights, tiles, share.end_job, share.end_stage);
  return share;
}

// Chunks of a sheet that is a tile: as many as have something to do when each gets whole segments. It depends on the
// weights and the GPU alone, so a row's sums do.
UNWEIGHT_HD constexpr uint32_t tile_chunks(uint64_t cost, uint32_t segment_stages, uint32_t multiprocessors) {
  const uint64_t even = uint64_t{segment_stages} * multiprocessors;
  const uint64_t most = segment_stages * ((cost + even - 1) / even);
  return static_cast<uint32_t>((cost + most - 1) / most);
}

constexpr uint32_t kNoChunk = 0xFFFFFFFFu;

// The chunk of a sheet that a CTA does. Each sheet goes on where the one before stopped, so that all CTAs have about as
// many; and a CTA's chunk is behind those of all CTAs before it, so that who waits for chunks waits for such CTAs.
UNWEIGHT_HD constexpr uint32_t chunk_of(uint32_t cta, uint32_t ctas, uint32_t sheet, uint32_t chunks) {
  const uint32_t start = sheet * chunks % ctas, wrapped = start + chunks > ctas ? start + chunks - ctas : 0;
  if (cta < wrapped) return cta;
  return cta >= start && cta - start < chunks - wrapped ? cta - start + wrapped : kNoChunk;
}

}  // namespace unweight::cuda
