// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/trace_context.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace precondor {
namespace {

// The example of the W3C recommendation.
constexpr char kExample[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceContextTest, ReadsAndWritesTraceparent) {
  const auto context = ParseTraceparent(kExample);
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->trace_id, "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(context->span_id, "00f067aa0ba902b7");
  EXPECT_TRUE(context->sampled);
  EXPECT_EQ(FormatTraceparent(*context), kExample);
  EXPECT_FALSE(ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02")->sampled);
  // A later version may have more behind what this one has.
  EXPECT_EQ(ParseTraceparent("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"), context);
}

TEST(TraceContextTest, RefusesWhatIsNone) {
  for (const char* const text : {"", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
                                 "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
                                 "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                                 "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
                                 "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x",
                                 "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
                                 "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                 "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                                 "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.more"}) {
    EXPECT_EQ(ParseTraceparent(text), std::nullopt) << text;
  }
}

TEST(TraceContextTest, NewTracesDifferAndAreValid) {
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const TraceContext context = NewTrace();
    EXPECT_EQ(ParseTraceparent(FormatTraceparent(context)), context);
    ids.insert(context.trace_id);
    ids.insert(context.span_id);
  }
  EXPECT_EQ(ids.size(), 200u);
}

TEST(TraceContextTest, AStepHasOneTrace) {
  EXPECT_EQ(TraceOfStep(7, 3), TraceOfStep(7, 3));
  std::set<std::string> ids;
  for (uint64_t session = 0; session < 10; ++session) {
    for (uint64_t step = 0; step < 100; ++step) {
      const TraceContext context = TraceOfStep(session, step);
      EXPECT_EQ(ParseTraceparent(FormatTraceparent(context)), context);
      ids.insert(context.trace_id);
    }
  }
  EXPECT_EQ(ids.size(), 1000u);
}

TEST(TraceContextTest, TheShareIsOfAllSteps) {
  constexpr int kSteps = 20000;
  for (const double share : {0.0, 0.01, 0.25, 1.0}) {
    int chosen = 0;
    for (uint64_t step = 0; step < kSteps; ++step) chosen += InShare(TraceOfStep(1764000000, step), share) ? 1 : 0;
    EXPECT_NEAR(chosen, share * kSteps, 0.01 * kSteps) << share;
  }
  EXPECT_FALSE(InShare(TraceOfStep(1, 1), 0));
  // The last 56 bits count: here half of their range.
  const TraceContext half = {"ffffffffffffffffff80000000000000", "00f067aa0ba902b7", false};
  EXPECT_FALSE(InShare(half, 0.5));
  EXPECT_TRUE(InShare(half, 0.5001));
}

}  // namespace
}  // namespace precondor
