// SPDX-License-Identifier: Apache-2.0
#include "precondor/convolution.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::Status Invalid(absl::string_view field, absl::string_view expected, const absl::AlphaNum& got) {
  return absl::InvalidArgumentError(absl::StrCat("convolution ", field, ": expected ", expected, ", got ", got));
}

absl::Status CheckAtLeast(absl::string_view field, int64_t value, int64_t low) {
  return value >= low ? absl::OkStatus() : Invalid(field, absl::StrCat("at least ", low), value);
}

absl::Status CheckArguments(const Convolution& conv, int64_t group, size_t elements, int64_t channels,
                            const int64_t (&extent)[2], int64_t cols, MatrixView out) {
  PRECONDOR_RETURN_IF_ERROR(ValidateConvolution(conv));
  if (group < 0 || group >= conv.groups) return Invalid("group", absl::StrCat("0 ... ", conv.groups - 1), group);
  const int64_t expected = conv.batch * channels * extent[0] * extent[1];
  if (static_cast<int64_t>(elements) != expected) return Invalid("elements", absl::StrCat(expected), elements);
  if (out.rows != conv.rows() || out.cols != cols) {
    return Invalid("out", absl::StrCat("[", conv.rows(), ", ", cols, "]"),
                   absl::StrCat("[", out.rows, ", ", out.cols, "]"));
  }
  return absl::OkStatus();
}

// Copies one output position's patch of one channel; zeros where the kernel lies on the padding.
float* CopyPatch(const Convolution& conv, const float* channel, int64_t top, int64_t left, float* to) {
  for (int64_t ky = 0; ky < conv.kernel[0]; ++ky) {
    const int64_t y = top + ky * conv.dilation[0];
    for (int64_t kx = 0; kx < conv.kernel[1]; ++kx, ++to) {
      const int64_t x = left + kx * conv.dilation[1];
      const bool inside = y >= 0 && y < conv.input[0] && x >= 0 && x < conv.input[1];
      *to = inside ? channel[y * conv.input[1] + x] : 0.0f;
    }
  }
  return to;
}

}  // namespace

int64_t Convolution::Output(int axis) const {
  const int64_t reach = dilation[axis] * (kernel[axis] - 1) + 1;
  return (input[axis] + 2 * padding[axis] - reach) / stride[axis] + 1;
}

std::vector<int64_t> Convolution::shape() const {
  if (has_bias) return {};
  return {d_out(), in_channels / groups, kernel[0], kernel[1]};
}

absl::Status ValidateConvolution(const Convolution& conv) {
  PRECONDOR_RETURN_IF_ERROR(CheckAtLeast("batch", conv.batch, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckAtLeast("groups", conv.groups, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckAtLeast("in_channels", conv.in_channels, 1));
  PRECONDOR_RETURN_IF_ERROR(CheckAtLeast("out_channels", conv.out_channels, 1));
  if (conv.in_channels % conv.groups != 0) {
    return Invalid("in_channels", absl::StrCat("a multiple of groups ", conv.groups), conv.in_channels);
  }
  if (conv.out_channels % conv.groups != 0) {
    return Invalid("out_channels", absl::StrCat("a multiple of groups ", conv.groups), conv.out_channels);
  }
  for (const int axis : {0, 1}) {
    const absl::string_view of = axis == 0 ? " height" : " width";
    PRECONDOR_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("input", of), conv.input[axis], 1));
    PRECONDOR_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("kernel", of), conv.kernel[axis], 1));
    PRECONDOR_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("stride", of), conv.stride[axis], 1));
    PRECONDOR_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("padding", of), conv.padding[axis], 0));
    PRECONDOR_RETURN_IF_ERROR(CheckAtLeast(absl::StrCat("dilation", of), conv.dilation[axis], 1));
    const int64_t reach = conv.dilation[axis] * (conv.kernel[axis] - 1) + 1;
    const int64_t padded = conv.input[axis] + 2 * conv.padding[axis];
    if (reach > padded) {
      return Invalid(absl::StrCat("kernel", of), absl::StrCat("one that fits into ", padded),
                     absl::StrCat(reach, " with its dilation"));
    }
  }
  return absl::OkStatus();
}

absl::Status UnfoldInput(const Convolution& conv, int64_t group, absl::Span<const float> input, MatrixView out) {
  PRECONDOR_RETURN_IF_ERROR(CheckArguments(conv, group, input.size(), conv.in_channels, conv.input, conv.d_in(), out));
  const int64_t channels = conv.in_channels / conv.groups;
  const int64_t plane = conv.input[0] * conv.input[1];
  int64_t row = 0;
  for (int64_t n = 0; n < conv.batch; ++n) {
    const float* first = input.data() + (n * conv.in_channels + group * channels) * plane;
    for (int64_t oy = 0; oy < conv.Output(0); ++oy) {
      for (int64_t ox = 0; ox < conv.Output(1); ++ox, ++row) {
        float* to = out.row(row);
        for (int64_t c = 0; c < channels; ++c) {
          to = CopyPatch(conv, first + c * plane, oy * conv.stride[0] - conv.padding[0],
                         ox * conv.stride[1] - conv.padding[1], to);
        }
        if (conv.has_bias) *to = 1.0f;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status UnfoldOutputGradient(const Convolution& conv, int64_t group, absl::Span<const float> gradient,
                                  MatrixView out) {
  PRECONDOR_RETURN_IF_ERROR(ValidateConvolution(conv));
  const int64_t extent[2] = {conv.Output(0), conv.Output(1)};
  PRECONDOR_RETURN_IF_ERROR(CheckArguments(conv, group, gradient.size(), conv.out_channels, extent, conv.d_out(), out));
  const int64_t plane = extent[0] * extent[1];
  for (int64_t n = 0; n < conv.batch; ++n) {
    const float* first = gradient.data() + (n * conv.out_channels + group * conv.d_out()) * plane;
    for (int64_t place = 0; place < plane; ++place) {
      float* to = out.row(n * plane + place);
      for (int64_t c = 0; c < conv.d_out(); ++c) to[c] = first[c * plane + place];
    }
  }
  return absl::OkStatus();
}

}  // namespace precondor
