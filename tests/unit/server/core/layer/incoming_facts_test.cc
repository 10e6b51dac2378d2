// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/incoming_facts.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "kernels/base/payload_digest.h"

namespace precondor {
namespace {

constexpr int64_t kElements = 2 * IncomingFacts::kBlock + 500;

Payload Encoded(DType dtype, float scale, const std::vector<float>& values) {
  Payload payload(values.size() * ByteSize(dtype));
  EncodeElements(dtype, values, scale, payload.data());
  return payload;
}

std::vector<float> Values() {
  std::vector<float> values(kElements);
  for (int64_t i = 0; i < kElements; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i % 7) - 3;
  return values;
}

ContributionHeader Gradient(DType dtype, float scale) {
  ContributionHeader header;
  header.kind = ContributionKind::kGradient;
  header.tensors = {{.dtype = dtype, .dims = {1, kElements}, .scale = scale}};
  return header;
}

IncomingFacts Inspect(const ContributionHeader& header, const Payload& payload, bool device_plane = false,
                      std::vector<size_t> arrived = {}) {
  IncomingFacts facts(header, payload.size(), /*with_norm=*/true, device_plane);
  arrived.push_back(payload.size());
  for (const size_t bytes : arrived) facts.Advance(absl::MakeConstSpan(payload).subspan(0, bytes));
  return facts;
}

TEST(IncomingFactsTest, FindsTheSameHoweverThePayloadArrives) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const ContributionHeader header = Gradient(dtype, 2);
    const Payload payload = Encoded(dtype, 2, Values());
    const IncomingFacts whole = Inspect(header, payload);
    const IncomingFacts parts = Inspect(header, payload, false, {0, 1, 4095, 4097, 4097, payload.size() - 1});
    EXPECT_EQ(parts.found().digest, whole.found().digest);
    EXPECT_EQ(parts.found().squared_norm, whole.found().squared_norm);
    EXPECT_FALSE(parts.found().not_finite.has_value());
    double squared = 0;
    for (const float value : Values()) squared += static_cast<double>(value) * value;
    EXPECT_EQ(whole.found().squared_norm, squared) << "small integers are exact";
  }
}

TEST(IncomingFactsTest, ItsDigestDependsOnEachByte) {
  const ContributionHeader header = Gradient(DType::kF32, 1);
  const Payload payload = Encoded(DType::kF32, 1, Values());
  const uint64_t digest = Inspect(header, payload).found().digest;
  for (const size_t at : {size_t{0}, size_t{4096}, payload.size() - 1}) {
    Payload other = payload;
    other[at] ^= 1;
    EXPECT_NE(Inspect(header, other).found().digest, digest) << at;
  }
  Payload swapped = payload;  // the first two blocks change places
  std::swap_ranges(swapped.begin(), swapped.begin() + 4096, swapped.begin() + 4096);
  EXPECT_NE(Inspect(header, swapped).found().digest, digest);
}

TEST(IncomingFactsTest, ADevicePlaneGivesTheDigestOfTheElements) {
  const Payload payload = Encoded(DType::kF32, 1, Values());
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 1), payload, /*device_plane=*/true, {5000}).found().digest,
            PayloadDigest(payload.data(), kElements));
}

TEST(IncomingFactsTest, NamesTheFirstBlockWithAValueThatIsNotFinite) {
  std::vector<float> values = Values();
  values[IncomingFacts::kBlock + 1] = std::numeric_limits<float>::quiet_NaN();
  values.back() = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Payload payload = Encoded(dtype, 1, values);
    EXPECT_EQ(Inspect(Gradient(dtype, 1), payload, false, {6000}).found().not_finite, IncomingFacts::kBlock);
  }
  // A finite element times the scale may be infinite.
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 1e38f), Encoded(DType::kF32, 1, Values())).found().not_finite, std::nullopt);
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 3e38f), Encoded(DType::kF32, 1, Values())).found().not_finite, 0);
}

}  // namespace
}  // namespace precondor
