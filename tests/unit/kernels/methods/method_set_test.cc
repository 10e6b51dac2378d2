// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/method_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/methods/registry.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

SessionSpec ThreeLayers() {
  SessionSpec spec;
  spec.layers = {{"first", 3, 4, false}, {"second", 5, 6, false}, {"third", 7, 8, false}};
  return spec;
}

TEST(MethodSetTest, GivesEachLayerItsOwn) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {{.method = {.name = "identity", .options = {}}, .layers = {0, 2}}};
  const absl::StatusOr<MethodSet> set = MethodSet::Make(spec);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->of(0).name(), "identity");
  EXPECT_EQ(set->of(1).name(), "mkor");
  EXPECT_EQ(&set->of(2), &set->of(0));
}

TEST(MethodSetTest, NamesTheEntryThatIsWrong) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {{.method = {.name = "mkor", .options = {{"rank", -1.0}}}, .layers = {1}}};
  const absl::Status status = MethodSet::Make(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer_methods[0]: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank"));
}

TEST(MethodSetTest, RefusesCovariancesForMethodsThatTakeVectors) {
  SessionSpec spec = ThreeLayers();
  spec.layer_methods = {
      {.method = {.name = "mkor", .options = {}}, .statistics = StatisticsKind::kCovariance, .layers = {1}}};
  const absl::Status status = MethodSet::Make(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 1 \"second\": statistics: expected vectors for method mkor"));
}

TEST(MethodSetTest, ClientsKnowWhichMethodsTakeStatistics) {
  for (const absl::string_view name : MethodNames()) {
    SessionSpec spec = ThreeLayers();
    spec.method.name = std::string(name);
    const absl::StatusOr<MethodSet> set = MethodSet::Make(spec);
    ASSERT_TRUE(set.ok()) << set.status();
    EXPECT_EQ(TakesStatistics(spec, 0), set->of(0).needs_statistics()) << name;
  }
}

}  // namespace
}  // namespace precondor
