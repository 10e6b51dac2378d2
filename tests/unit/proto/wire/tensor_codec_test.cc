// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/tensor_codec.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error_reason.h"

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;

v1::TensorHeader Header(v1::DataType type, std::vector<int64_t> dims, float scale = 0) {
  v1::TensorHeader header;
  header.set_data_type(type);
  for (const int64_t dim : dims) header.add_dims(dim);
  header.set_scale(scale);
  return header;
}

TensorHeaders List(std::vector<v1::TensorHeader> headers) { return TensorHeaders(headers.begin(), headers.end()); }

void ExpectRefused(const absl::Status& status, ErrorReason reason, const std::string& text) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(GetErrorReason(status), reason) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

// Elements by the formulas of IEEE 754 and bfloat16: sign, exponent, fraction, in f64.
double ReadElement(DType dtype, const uint8_t* bytes) {
  const int size = dtype == DType::kF32 ? 4 : 2;
  uint32_t bits = 0;
  for (int i = size - 1; i >= 0; --i) bits = bits << 8 | bytes[i];  // little-endian
  const int exponent_bits = dtype == DType::kF16 ? 5 : 8;
  const int fraction_bits = 8 * size - 1 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << fraction_bits) - 1)), -fraction_bits);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return (bits >> (8 * size - 1)) != 0 ? -magnitude : magnitude;
}

TEST(TensorHeaderTest, RoundTripKeepsTypeShapeAndScale) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const float scale : {1.0f, 0.5f, 4096.0f}) {
      const TensorFormat format{dtype, {3, 1, 1 << 20}, scale};
      const absl::StatusOr<TensorFormat> back = DecodeTensorHeader(EncodeTensorHeader(format), "t");
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(*back, format);
    }
  }
}

TEST(TensorHeaderTest, ScaleZeroMeansOne) {
  EXPECT_EQ(DecodeTensorHeader(Header(v1::DATA_TYPE_F16, {2}, 0), "t")->scale, 1.0f);
}

TEST(TensorHeaderTest, RefusesWhatIsNoTensor) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto refused = [](const v1::TensorHeader& header, const std::string& text) {
    ExpectRefused(DecodeTensorHeader(header, "gradient").status(), ErrorReason::kMalformed, text);
    ExpectRefused(PayloadBytes(List({header})).status(), ErrorReason::kMalformed, "tensors[0]");
  };
  refused(Header(v1::DATA_TYPE_UNSPECIFIED, {2}), "gradient.data_type: expected a DataType of 1 ... 3, got 0");
  refused(Header(static_cast<v1::DataType>(4), {2}), "got 4");
  refused(Header(v1::DATA_TYPE_F32, {}), "gradient.dims: expected 1 ... 8 extents, got 0");
  refused(Header(v1::DATA_TYPE_F32, std::vector<int64_t>(9, 1)), "got 9");
  refused(Header(v1::DATA_TYPE_F32, {4, 0}), "expected extents of at least 1, got 0");
  refused(Header(v1::DATA_TYPE_F32, {-1, -4}), "got -1");
  refused(Header(v1::DATA_TYPE_F32, {std::numeric_limits<int64_t>::min()}), "got -9223372036854775808");
  refused(Header(v1::DATA_TYPE_F16, {4}, -1), "gradient.scale: expected a positive finite number, got -1");
  refused(Header(v1::DATA_TYPE_F16, {4}, inf), "got inf");
  refused(Header(v1::DATA_TYPE_F16, {4}, std::nanf("")), "got nan");
}

TEST(PayloadBytesTest, AddsUpTheTensors) {
  EXPECT_EQ(*PayloadBytes(List({})), 0u);
  EXPECT_EQ(*PayloadBytes(List({Header(v1::DATA_TYPE_F32, {3, 5})})), 60u);
  EXPECT_EQ(*PayloadBytes(List({Header(v1::DATA_TYPE_F16, {4, 1024}), Header(v1::DATA_TYPE_BF16, {4, 4097})})),
            2u * 4 * (1024 + 4097));
  EXPECT_EQ(*PayloadBytes(List({Header(v1::DATA_TYPE_F32, {1 << 20, 1 << 20})})), uint64_t{1} << 42);
}

TEST(PayloadBytesTest, NeverOverflows) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const auto refused = [](const TensorHeaders& headers) {
    ExpectRefused(PayloadBytes(headers).status(), ErrorReason::kSizeMismatch, "tensors");
  };
  refused(List({Header(v1::DATA_TYPE_F32, {huge})}));
  refused(List({Header(v1::DATA_TYPE_F32, {huge, huge, huge, huge})}));
  refused(List({Header(v1::DATA_TYPE_F32, {int64_t{1} << 32, int64_t{1} << 32})}));  // 4 * 2^64
  refused(List({Header(v1::DATA_TYPE_F16, {1, 1 << 20, 1 << 20, 1 << 20, 8})}));     // 2 * 2^63
  refused(List({Header(v1::DATA_TYPE_F16, {static_cast<int64_t>(kMaxPayloadBytes / 2) + 1})}));
  EXPECT_EQ(*PayloadBytes(List({Header(v1::DATA_TYPE_F16, {static_cast<int64_t>(kMaxPayloadBytes / 2)})})),
            kMaxPayloadBytes);
  const v1::TensorHeader half = Header(v1::DATA_TYPE_F16, {static_cast<int64_t>(kMaxPayloadBytes / 4)});
  EXPECT_EQ(*PayloadBytes(List({half, half})), kMaxPayloadBytes);
  refused(List({half, half, half}));
  ExpectRefused(PayloadBytes(List(std::vector<v1::TensorHeader>(9, Header(v1::DATA_TYPE_F16, {1})))).status(),
                ErrorReason::kMalformed, "expected at most 8, got 9");
}

TEST(PayloadBytesTest, DecodeTensorHeadersAgrees) {
  const auto formats =
      DecodeTensorHeaders(List({Header(v1::DATA_TYPE_F16, {2, 3}, 2), Header(v1::DATA_TYPE_F32, {5})}));
  ASSERT_TRUE(formats.ok());
  const std::vector<TensorFormat> expected = {{DType::kF16, {2, 3}, 2}, {DType::kF32, {5}, 1}};
  EXPECT_EQ(*formats, expected);
  ExpectRefused(DecodeTensorHeaders(List({Header(v1::DATA_TYPE_F16, {2}), Header(v1::DATA_TYPE_F32, {0})})).status(),
                ErrorReason::kMalformed, "tensors[1].dims");
}

struct MatrixCase {
  int64_t rows, cols, stride;
};

class MatrixCodecTest : public ::testing::TestWithParam<MatrixCase> {
 protected:
  // Values of both signs over ten powers of two, with guards between the rows.
  MatrixCodecTest() : memory_(GetParam().rows * GetParam().stride + 1, kGuard) {
    std::mt19937 random(GetParam().rows * 1000 + GetParam().cols);
    std::normal_distribution<float> normal;
    MatrixView m = view();
    for (int64_t i = 0; i < m.rows; ++i) {
      for (int64_t j = 0; j < m.cols; ++j) m.at(i, j) = std::ldexp(normal(random), static_cast<int>(random() % 10) - 5);
    }
  }
  MatrixView view() { return MatrixView(memory_.data(), GetParam().rows, GetParam().cols, GetParam().stride); }

  static constexpr float kGuard = 777.25f;
  std::vector<float> memory_;
};

TEST_P(MatrixCodecTest, ElementsSurviveWithinTheTypesPrecision) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    // Half a unit in the last place: 24, 11 and 8 bits of significand. f16 may also be subnormal: 2^-25 absolute.
    const double epsilon = dtype == DType::kF32 ? 0 : std::ldexp(1, dtype == DType::kF16 ? -11 : -8);
    const double absolute = dtype == DType::kF16 ? std::ldexp(1, -25) : 0;
    for (const float scale : {1.0f, 4.0f}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " scale " << scale);
      const MatrixView m = view();
      const size_t width = ByteSize(dtype);
      std::vector<uint8_t> bytes(m.size() * width + 2, 0xEE);  // from an odd address, with a guard at each end
      const auto payload = absl::MakeSpan(bytes).subspan(1, m.size() * width);
      ASSERT_TRUE(EncodeMatrix(dtype, scale, m, payload).ok());
      EXPECT_EQ(bytes.front(), 0xEE);
      EXPECT_EQ(bytes.back(), 0xEE);
      std::vector<float> back(m.size());
      DecodeElements(dtype, payload.data(), scale, absl::MakeSpan(back));
      for (int64_t i = 0; i < m.rows; ++i) {
        for (int64_t j = 0; j < m.cols; ++j) {
          const double x = m.at(i, j);
          const double sent = ReadElement(dtype, payload.data() + (i * m.cols + j) * width) * scale;
          ASSERT_LE(std::abs(sent - x), epsilon * std::abs(x) + absolute * scale) << i << ", " << j;
          ASSERT_EQ(back[i * m.cols + j], static_cast<float>(sent)) << i << ", " << j;
        }
      }
    }
  }
}

TEST_P(MatrixCodecTest, AliasIsWhatEncodingWrites) {
  const MatrixView m = view();
  EXPECT_TRUE(AliasPayload(DType::kF16, m).empty());
  EXPECT_TRUE(AliasPayload(DType::kBF16, m).empty());
  const absl::Span<const uint8_t> alias = AliasPayload(DType::kF32, m);
  if (m.rows > 1 && m.stride != m.cols) {
    EXPECT_TRUE(alias.empty());
    return;
  }
  std::vector<uint8_t> bytes(m.size() * 4);
  ASSERT_TRUE(EncodeMatrix(DType::kF32, 1, m, absl::MakeSpan(bytes)).ok());
  EXPECT_EQ(static_cast<const void*>(alias.data()), m.data);
  EXPECT_EQ(std::vector<uint8_t>(alias.begin(), alias.end()), bytes);
}

TEST_P(MatrixCodecTest, RefusesAnotherNumberOfBytes) {
  const MatrixView m = view();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const size_t right = m.size() * ByteSize(dtype);
    for (const size_t wrong : {size_t{0}, right - 1, right + 1, right * 2}) {
      std::vector<uint8_t> bytes(wrong + 1);
      const auto span = absl::MakeSpan(bytes).first(wrong);
      ExpectRefused(EncodeMatrix(dtype, 1, m, span), ErrorReason::kSizeMismatch, "expected");
    }
  }
}

TEST_P(MatrixCodecTest, F16ScaleKeepsLargeMatricesInRange) {
  MatrixView m = view();
  m.at(m.rows - 1, m.cols - 1) = -3.0e7f;  // f16 ends at 65504
  const float scale = TensorScale(DType::kF16, m);
  EXPECT_EQ(TensorScale(DType::kBF16, m), 1.0f);
  EXPECT_EQ(TensorScale(DType::kF32, m), 1.0f);
  std::vector<uint8_t> bytes(m.size() * 2);
  ASSERT_TRUE(EncodeMatrix(DType::kF16, scale, m, absl::MakeSpan(bytes)).ok());
  const double sent = ReadElement(DType::kF16, bytes.data() + bytes.size() - 2) * scale;
  EXPECT_NEAR(sent, -3.0e7, 3.0e7 * std::ldexp(1, -11));
}

INSTANTIATE_TEST_SUITE_P(Shapes, MatrixCodecTest,
                         ::testing::Values(MatrixCase{1, 1, 1}, MatrixCase{1, 7, 9}, MatrixCase{7, 1, 1},
                                           MatrixCase{5, 1, 3}, MatrixCase{3, 17, 17}, MatrixCase{13, 31, 33},
                                           MatrixCase{64, 65, 65}, MatrixCase{33, 128, 160}),
                         [](const ::testing::TestParamInfo<MatrixCase>& info) {
                           return std::to_string(info.param.rows) + "x" + std::to_string(info.param.cols) + "by" +
                                  std::to_string(info.param.stride);
                         });

TEST(ChunkPlanTest, CoversThePayloadInOrder) {
  for (const uint64_t total : {0, 1, 9, 10, 11, 20, 99, 100, 101}) {
    for (const uint64_t chunk : {1, 10, 1000}) {
      const std::vector<Chunk> chunks = PlanChunks(total, chunk);
      ASSERT_FALSE(chunks.empty());
      uint64_t next = 0;
      for (const Chunk& c : chunks) {
        EXPECT_EQ(c.offset, next);
        EXPECT_LE(c.size, chunk);
        next += c.size;
      }
      EXPECT_EQ(next, total);
      EXPECT_EQ(chunks.size(), total == 0 ? 1 : (total + chunk - 1) / chunk);
    }
  }
  EXPECT_EQ(PlanChunks(5 * kChunkBytes + 1).size(), 6u);
  EXPECT_EQ(PlanChunks(3, 0).size(), 3u);
}

}  // namespace
}  // namespace precondor::wire
