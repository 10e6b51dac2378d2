// SPDX-License-Identifier: Apache-2.0
// Turns a two-dimensional convolution into a layer with rows: W [d_out, d_in] with d_out = output channels and d_in =
// input channels * kernel height * kernel width, in the order of a weight [out, in, kh, kw] seen as a matrix (that of
// torch.nn.functional.unfold). With `groups`, each group is its own layer of the session, with its share of the
// channels. All functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// Shape of a convolution. Arrays hold {height, width}.
struct Convolution {
  int64_t batch = 1;
  int64_t in_channels = 1;
  int64_t out_channels = 1;
  int64_t input[2] = {1, 1};
  int64_t kernel[2] = {1, 1};
  int64_t stride[2] = {1, 1};
  int64_t padding[2] = {0, 0};  // zeros on both sides
  int64_t dilation[2] = {1, 1};
  int64_t groups = 1;
  bool has_bias = false;  // the layer's last column is the bias, and every row ends in a 1

  // Returns the output's extent: floor((input + 2 padding - dilation (kernel - 1) - 1) / stride) + 1.
  int64_t Output(int axis) const;
  // One row for each position of the kernel: batch * output height * output width.
  int64_t rows() const { return batch * Output(0) * Output(1); }
  int64_t d_in() const { return in_channels / groups * kernel[0] * kernel[1] + (has_bias ? 1 : 0); }
  int64_t d_out() const { return out_channels / groups; }
  // Returns LayerSpec::shape: {d_out, input channels of the group, kernel height, kernel width}; empty with has_bias.
  std::vector<int64_t> shape() const;
};

// Returns INVALID_ARGUMENT, which names the field, the accepted values and the actual value.
absl::Status ValidateConvolution(const Convolution& conv);

// Copies the patches that group `group` sees, from input [batch, in_channels, height, width] to out [rows, d_in]. Rows
// are in the order of (sample, output row, output column). Use the result in ComputeStatistics with row_scale 1.
// Returns INVALID_ARGUMENT if a shape does not match.
absl::Status UnfoldInput(const Convolution& conv, int64_t group, absl::Span<const float> input, MatrixView out);

// Copies the gradient with respect to the output, [batch, out_channels, output height, output width], to out [rows,
// d_out], with rows in the order of UnfoldInput. If the loss is a mean over samples, use the result in
// ComputeStatistics with row_scale = batch. Returns INVALID_ARGUMENT if a shape does not match.
absl::Status UnfoldOutputGradient(const Convolution& conv, int64_t group, absl::Span<const float> gradient,
                                  MatrixView out);

}  // namespace precondor
