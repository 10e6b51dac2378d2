// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/digits_data.h"

#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace precondor::digits {
namespace {

using ::testing::HasSubstr;

std::string Line(int pixel, int label) {
  std::string line;
  for (int i = 0; i < kPixels; ++i) absl::StrAppend(&line, pixel, ",");
  return absl::StrCat(line, label);
}

TEST(ParseDigitsTest, ScalesPixelsAndKeepsLabels) {
  const auto examples = ParseDigits(absl::StrCat(Line(16, 3), "\n", Line(4, 9), "\n"));
  ASSERT_TRUE(examples.ok()) << examples.status();
  EXPECT_EQ(examples->size(), 2);
  EXPECT_EQ(examples->labels, (std::vector<int32_t>{3, 9}));
  EXPECT_EQ(examples->pixels.view().at(0, 63), 1.0f);
  EXPECT_EQ(examples->pixels.view().at(1, 0), 0.25f);
}

TEST(ParseDigitsTest, NamesTheLineThatIsWrong) {
  const std::string good = Line(1, 1);
  for (const auto& [bad, expected] : std::vector<std::pair<std::string, std::string>>{
           {Line(17, 1), "line 2: expected 64 pixels 0 ... 16 and a label 0 ... 9, got \"17,17"},
           {Line(1, 10), "line 2: expected"},
           {"1,2,3", "got \"1,2,3\""},
           {"", "got \"\""},
           {absl::StrCat("x", good), "got \"x1,"}}) {
    const auto examples = ParseDigits(absl::StrCat(good, "\n", bad, "\n", good));
    EXPECT_EQ(examples.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(examples.status().message()), HasSubstr(expected));
  }
}

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
}

TEST(LoadDigitsTest, NamesTheFileThatIsMissing) {
  const auto data = LoadDigits("no/such/file.csv");
  EXPECT_EQ(data.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(data.status().message()), HasSubstr("no/such/file.csv"));
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
