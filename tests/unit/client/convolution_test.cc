// SPDX-License-Identifier: Apache-2.0
// A convolution computed from its definition, and as a matrix product over unfolded rows.
#include "precondor/convolution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/session_spec.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

std::vector<float> Normal(int64_t count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = normal(rng);
  return out;
}

// output[n][o][y][x] = bias[o] + sum_{c,ky,kx} weight[o][c][ky][kx] input[n][group's c][y sy + ky dy - py][...].
double Direct(const Convolution& conv, const std::vector<float>& input, const std::vector<float>& weight,
              const std::vector<float>& bias, int64_t n, int64_t o, int64_t y, int64_t x) {
  const int64_t channels = conv.in_channels / conv.groups;
  const int64_t group = o / (conv.out_channels / conv.groups);
  double sum = conv.has_bias ? bias[static_cast<size_t>(o)] : 0;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t ky = 0; ky < conv.kernel[0]; ++ky) {
      for (int64_t kx = 0; kx < conv.kernel[1]; ++kx) {
        const int64_t iy = y * conv.stride[0] + ky * conv.dilation[0] - conv.padding[0];
        const int64_t ix = x * conv.stride[1] + kx * conv.dilation[1] - conv.padding[1];
        if (iy < 0 || iy >= conv.input[0] || ix < 0 || ix >= conv.input[1]) continue;
        const int64_t at = ((n * conv.in_channels + group * channels + c) * conv.input[0] + iy) * conv.input[1] + ix;
        const int64_t of = ((o * channels + c) * conv.kernel[0] + ky) * conv.kernel[1] + kx;
        sum += static_cast<double>(weight[static_cast<size_t>(of)]) * input[static_cast<size_t>(at)];
      }
    }
  }
  return sum;
}

class ConvolutionTest : public ::testing::TestWithParam<Convolution> {};

TEST_P(ConvolutionTest, IsAProductOverUnfoldedRows) {
  const Convolution& conv = GetParam();
  const int64_t channels = conv.in_channels / conv.groups;
  const int64_t patch = channels * conv.kernel[0] * conv.kernel[1];
  const std::vector<float> input = Normal(conv.batch * conv.in_channels * conv.input[0] * conv.input[1], 1);
  const std::vector<float> weight = Normal(conv.out_channels * patch, 2);
  const std::vector<float> bias = Normal(conv.out_channels, 3);
  for (int64_t group = 0; group < conv.groups; ++group) {
    std::vector<float> rows(static_cast<size_t>(conv.rows() * conv.d_in()), -77.0f);
    const absl::Status status = UnfoldInput(conv, group, input, MatrixView(rows.data(), conv.rows(), conv.d_in()));
    ASSERT_TRUE(status.ok()) << status;
    int64_t row = 0;
    for (int64_t n = 0; n < conv.batch; ++n) {
      for (int64_t y = 0; y < conv.Output(0); ++y) {
        for (int64_t x = 0; x < conv.Output(1); ++x, ++row) {
          for (int64_t o = group * conv.d_out(); o < (group + 1) * conv.d_out(); ++o) {
            double product = conv.has_bias ? static_cast<double>(bias[static_cast<size_t>(o)]) *
                                                 rows[static_cast<size_t>(row * conv.d_in() + patch)]
                                           : 0;
            for (int64_t j = 0; j < patch; ++j) {
              product += static_cast<double>(weight[static_cast<size_t>(o * patch + j)]) *
                         rows[static_cast<size_t>(row * conv.d_in() + j)];
            }
            EXPECT_NEAR(product, Direct(conv, input, weight, bias, n, o, y, x), 1e-12);
          }
        }
      }
    }
    EXPECT_EQ(row, conv.rows());
  }
}

// The gradient of <gradient, output> with respect to the weight is gradient rows' times input rows.
TEST_P(ConvolutionTest, OutputGradientRowsMeetTheirInputRows) {
  const Convolution& conv = GetParam();
  const int64_t channels = conv.in_channels / conv.groups;
  const int64_t patch = channels * conv.kernel[0] * conv.kernel[1];
  const int64_t plane = conv.Output(0) * conv.Output(1);
  const std::vector<float> input = Normal(conv.batch * conv.in_channels * conv.input[0] * conv.input[1], 4);
  const std::vector<float> gradient = Normal(conv.batch * conv.out_channels * plane, 5);
  const int64_t group = conv.groups - 1;
  std::vector<float> a(static_cast<size_t>(conv.rows() * conv.d_in()));
  std::vector<float> g(static_cast<size_t>(conv.rows() * conv.d_out()));
  ASSERT_TRUE(UnfoldInput(conv, group, input, MatrixView(a.data(), conv.rows(), conv.d_in())).ok());
  const absl::Status status =
      UnfoldOutputGradient(conv, group, gradient, MatrixView(g.data(), conv.rows(), conv.d_out()));
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t o = 0; o < conv.d_out(); ++o) {
    const int64_t channel = group * conv.d_out() + o;
    for (int64_t j = 0; j < patch; ++j) {
      double product = 0;
      for (int64_t r = 0; r < conv.rows(); ++r) {
        product += static_cast<double>(g[static_cast<size_t>(r * conv.d_out() + o)]) *
                   a[static_cast<size_t>(r * conv.d_in() + j)];
      }
      // Central difference of a linear function: exact.
      std::vector<float> one(static_cast<size_t>(conv.out_channels * patch));
      one[static_cast<size_t>(channel * patch + j)] = 1;
      const std::vector<float> no_bias(static_cast<size_t>(conv.out_channels));
      double expected = 0;
      for (int64_t n = 0; n < conv.batch; ++n) {
        for (int64_t place = 0; place < plane; ++place) {
          expected += gradient[static_cast<size_t>((n * conv.out_channels + channel) * plane + place)] *
                      Direct(conv, input, one, no_bias, n, channel, place / conv.Output(1), place % conv.Output(1));
        }
      }
      EXPECT_NEAR(product, expected, 1e-9) << o << ", " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Geometries, ConvolutionTest,
    ::testing::Values(Convolution{.input = {1, 1}},
                      Convolution{.batch = 2, .in_channels = 3, .out_channels = 2, .input = {5, 6}, .kernel = {3, 2}},
                      Convolution{.batch = 2,
                                  .in_channels = 2,
                                  .out_channels = 3,
                                  .input = {7, 5},
                                  .kernel = {3, 3},
                                  .stride = {2, 1},
                                  .padding = {1, 2},
                                  .has_bias = true},
                      Convolution{.in_channels = 4,
                                  .out_channels = 6,
                                  .input = {8, 9},
                                  .kernel = {2, 3},
                                  .stride = {1, 3},
                                  .padding = {0, 1},
                                  .dilation = {3, 2},
                                  .groups = 2,
                                  .has_bias = true},
                      Convolution{
                          .in_channels = 3, .out_channels = 3, .input = {4, 4}, .kernel = {3, 3}, .groups = 3}));

TEST(ConvolutionShapeTest, IsTheWeightsOfAGroup) {
  Convolution conv;
  conv.in_channels = 12;
  conv.out_channels = 8;
  conv.groups = 4;
  conv.kernel[0] = 3;
  conv.kernel[1] = 5;
  SessionSpec spec;
  spec.name = "conv";
  spec.layers = {{"w", conv.d_out(), conv.d_in(), false, conv.shape()}};
  EXPECT_EQ(spec.layers[0].shape, (std::vector<int64_t>{2, 3, 3, 5}));
  EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
  conv.has_bias = true;
  spec.layers = {{"w", conv.d_out(), conv.d_in(), true, conv.shape()}};
  EXPECT_TRUE(spec.layers[0].shape.empty());
  EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
}

TEST(ConvolutionValidationTest, NamesTheField) {
  const auto message = [](Convolution conv) { return std::string(ValidateConvolution(conv).message()); };
  EXPECT_THAT(message({.batch = 0}), HasSubstr("batch: expected at least 1, got 0"));
  EXPECT_THAT(message({.in_channels = 3, .out_channels = 4, .groups = 2}),
              HasSubstr("in_channels: expected a multiple of groups 2, got 3"));
  EXPECT_THAT(message({.in_channels = 4, .out_channels = 3, .groups = 2}), HasSubstr("out_channels"));
  EXPECT_THAT(message({.stride = {1, 0}}), HasSubstr("stride width: expected at least 1, got 0"));
  EXPECT_THAT(message({.padding = {-1, 0}}), HasSubstr("padding height"));
  EXPECT_THAT(message({.input = {4, 4}, .kernel = {3, 1}, .dilation = {2, 1}}),
              HasSubstr("kernel height: expected one that fits into 4, got 5 with its dilation"));
}

TEST(ConvolutionValidationTest, ShapesAreHeldToTheGeometry) {
  const Convolution conv{.in_channels = 2, .out_channels = 2, .input = {3, 3}, .kernel = {2, 2}};
  std::vector<float> input(18), out(64);
  EXPECT_TRUE(UnfoldInput(conv, 0, input, MatrixView(out.data(), 4, 8)).ok());
  EXPECT_THAT(std::string(UnfoldInput(conv, 0, input, MatrixView(out.data(), 4, 7)).message()),
              HasSubstr("out: expected [4, 8], got [4, 7]"));
  EXPECT_THAT(std::string(UnfoldInput(conv, 1, input, MatrixView(out.data(), 4, 8)).message()),
              HasSubstr("group: expected 0 ... 0, got 1"));
  EXPECT_THAT(
      std::string(UnfoldInput(conv, 0, absl::MakeSpan(input).first(17), MatrixView(out.data(), 4, 8)).message()),
      HasSubstr("elements: expected 18, got 17"));
}

}  // namespace
}  // namespace precondor
