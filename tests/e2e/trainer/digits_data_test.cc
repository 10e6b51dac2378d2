// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/digits_data.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>
#include <vector>

namespace precondor::digits {
namespace {

TEST(LoadDigitsTest, ReadsTheShippedFile) {
  const auto data = LoadDigits(PRECONDOR_DIGITS_DATA);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train.size(), 1438);
  EXPECT_EQ(data->held_out.size(), 359);
  // Counts of each digit that the data set's own description gives for this part.
  std::vector<int> counts(kClasses);
  for (const Examples* part : {&data->train, &data->held_out}) {
    for (const int32_t label : part->labels) ++counts[static_cast<size_t>(label)];
  }
  EXPECT_EQ(counts, (std::vector<int>{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}));
  // Pixels are scaled to 0 ... 1.
  const std::vector<float>& pixels = data->train.pixels.data();
  EXPECT_EQ(*std::min_element(pixels.begin(), pixels.end()), 0.0f);
  EXPECT_EQ(*std::max_element(pixels.begin(), pixels.end()), 1.0f);
}

TEST(BatchRowsTest, AreAFunctionOfSeedAndStepThatPassesThroughAll) {
  constexpr int64_t kExamples = 100;
  constexpr int64_t kBatch = 25;
  std::set<int32_t> seen;
  for (uint64_t step = 0; step < 4; ++step) {
    const std::vector<int32_t> rows = BatchRows(kExamples, kBatch, 7, step);
    EXPECT_EQ(rows, BatchRows(kExamples, kBatch, 7, step));
    EXPECT_NE(rows, BatchRows(kExamples, kBatch, 8, step));
    seen.insert(rows.begin(), rows.end());
  }
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_EQ(*seen.rbegin(), 99);
  EXPECT_NE(BatchRows(kExamples, kBatch, 7, 0), BatchRows(kExamples, kBatch, 7, 4));  // another order each pass
}

}  // namespace
}  // namespace precondor::digits
