// SPDX-License-Identifier: Apache-2.0
// Rows of a two-dimensional convolution, so that it is a layer like any other: W [d_out, d_in] with d_out = output
// channels and d_in = input channels * kernel height * kernel width, in the order of a weight [out, in, kh, kw] seen as
// a matrix, which is torch.nn.functional.unfold's. With `groups` there is one such layer for each group, of its share
// of the channels: layers of their own in the session. All functions are pure and thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// Everything per axis is {height, width}.
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
  bool has_bias = false;  // the layer has a last column for it, and every row a last 1

  // floor((input + 2 padding - dilation (kernel - 1) - 1) / stride) + 1.
  int64_t Output(int axis) const;
  // One for each place of the kernel: batch * output height * output width.
  int64_t rows() const { return batch * Output(0) * Output(1); }
  int64_t d_in() const { return in_channels / groups * kernel[0] * kernel[1] + (has_bias ? 1 : 0); }
  int64_t d_out() const { return out_channels / groups; }
  // For LayerSpec::shape: {d_out, input channels of the group, kernel height, kernel width}; none with has_bias.
  std::vector<int64_t> shape() const;
};

// InvalidArgument names the field, what was expected and what came.
absl::Status ValidateConvolution(const Convolution& conv);

// The patches that group `group` sees: input [batch, in_channels, height, width] to out [rows, d_in], rows in the order
// of (sample, output row, output column). For ComputeStatistics with row_scale 1. InvalidArgument for shapes.
absl::Status UnfoldInput(const Convolution& conv, int64_t group, absl::Span<const float> input, MatrixView out);

// The gradient with respect to the output, [batch, out_channels, output height, output width], to out [rows, d_out], in
// the same order. For ComputeStatistics with row_scale = batch, when the loss is a mean over samples. InvalidArgument
// for shapes.
absl::Status UnfoldOutputGradient(const Convolution& conv, int64_t group, absl::Span<const float> gradient,
                                  MatrixView out);

}  // namespace precondor
