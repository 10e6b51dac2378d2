// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/shard_watch.h"

#include "gtest/gtest.h"

namespace precondor {
namespace {

absl::Time AtSecond(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// Two shards, with probes 1 s apart.
ShardWatch MakeWatch() { return ShardWatch(2, absl::Seconds(1), AtSecond(0)); }

TEST(ShardWatchTest, AShardIsUnreachableAfterThreeProbes) {
  ShardWatch watch = MakeWatch();
  for (int s = 1; s <= 5; ++s) EXPECT_EQ(watch.NoteSilence(0, AtSecond(s)), s == ShardWatch::kLeastProbes);
  EXPECT_EQ(watch.unreachable(), 1);
}

TEST(ShardWatchTest, ProbesThatAreTooCloseOrTooOldDoNotCount) {
  ShardWatch watch = MakeWatch();
  watch.NoteAnswer(0, AtSecond(3));
  EXPECT_FALSE(watch.NoteSilence(0, AtSecond(2))) << "sent before the answer";
  EXPECT_TRUE(watch.IsSilent(0));
  for (int i = 0; i < 9; ++i) watch.NoteSilence(0, AtSecond(4) + absl::Milliseconds(i));
  EXPECT_EQ(watch.unreachable(), 0);
}

TEST(ShardWatchTest, AnAnswerEndsTheSilence) {
  ShardWatch watch = MakeWatch();
  for (int s = 1; s <= 3; ++s) watch.NoteSilence(0, AtSecond(s));
  EXPECT_TRUE(watch.NoteAnswer(0, AtSecond(4)));
  EXPECT_FALSE(watch.NoteAnswer(0, AtSecond(5))) << "it was reachable";
  EXPECT_FALSE(watch.IsSilent(0));
  EXPECT_EQ(watch.unreachable(), 0);
}

TEST(ShardWatchTest, ARestartForgetsSilence) {
  ShardWatch watch = MakeWatch();
  for (int s = 1; s <= 9; ++s) watch.NoteSilence(0, AtSecond(s));
  ASSERT_EQ(watch.unreachable(), 1);
  watch.Restart(AtSecond(9));
  EXPECT_EQ(watch.unreachable(), 0);
}

}  // namespace
}  // namespace precondor
