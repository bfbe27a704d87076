// What the products (linear, grouped_linear, linear_many) ask of their arguments on every device, and F.linear itself.
#pragma once
#include <optional>
#include <vector>

#include "../format/error.h"
#include "arguments.h"

namespace unweight {

using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<ScalarType>;

// The dtype of the result: x's, or FP32 where sums of BF16 are asked for as they are.
ScalarType check_x(const Tensor& x, OptionalType out_dtype);
void check_bias(const Tensor& x, const OptionalTensor& bias, const std::vector<int64_t>& shape);
// The packed weight that the product after this one reads: only GPUs make use of it, all devices look at it.
void check_next(const Tensor& x, const OptionalTensor& next_w);
// Of grouped_linear: x [M, K], offs i32 [E].
void check_groups(const Tensor& x, const Tensor& offs, const PackedArgument& packed);
// Ends of the experts' rows, read: ascending, within the rows. `offs` is on the CPU.
std::vector<int64_t> checked_ends(const Tensor& offs, int64_t rows);
// Of linear_many: as many of each as there are weights, or no layouts at all.
void check_counts(size_t weights, size_t biases, size_t layouts);

// Adds to an error which weight of a list it is about.
template <class Check>
void for_each_weight(size_t count, const Check& check) {
  for (size_t i = 0; i < count; i++) {
    try {
      check(i);
    } catch (const Error& error) {
      fail(error.what(), " (weight ", i, " of the list)");
    }
  }
}

// Does every row's result have to be the same in any company, on a GPU and whatever it costs? Of the whole process.
bool batch_invariant();

// x as rows: leading dimensions are one.
int64_t row_count(const Tensor& x);
// Elements from row to row where they are the same everywhere and rows themselves have no gaps.
std::optional<int64_t> row_stride(const Tensor& x);
// Rows [first, first + count) of a tensor's dimension `dim`, where they lie.
Tensor part(const Tensor& tensor, int64_t dim, int64_t first, int64_t count);
// [..., out_features] for x [..., in_features].
Tensor new_result(const Tensor& x, int64_t out_features, ScalarType dtype);

// F.linear(x, weight, bias), so that results are the original model's to the last bit; with the dtypes of x, or in FP32
// where `out_dtype` is FP32.
Tensor multiply_exactly(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, ScalarType out_dtype);
// The same of each expert's rows, which end at `ends` (ascending, within x); zeros behind the last ones. weight [E, N,
// K].
Tensor multiply_groups_exactly(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& ends,
                               const OptionalTensor& bias, ScalarType out_dtype);

}  // namespace unweight
