// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/kept_factors.h"

#include <utility>

#include "gtest/gtest.h"

#include "server/store/posix_file_system.h"
#include "tests/support/fake_clock.h"
#include "tests/support/temp_dir.h"

namespace precondor::recovery {
namespace {

TEST(KeptFactorsTest, ASnapshotDoesNotCountOnAFileThatIsStillToBeReplaced) {
  const TempDir dir;
  store::PosixFileSystem fs;
  FakeClock clock;
  NullLogger logger;
  StoreObserver observer;
  std::vector<std::function<void()>> jobs;
  const auto run = [&] {
    for (const auto& job : std::exchange(jobs, {})) job();
  };
  const KeptFactors::Options options{.post = [&](std::function<void()> job) { jobs.push_back(std::move(job)); },
                                     .sync = [] {}};
  {
    KeptFactors before(fs, dir.path(), options, clock, logger, observer);
    ASSERT_TRUE(before.Open().ok());
    before.Keep("job", {.session_id = 7, .release = 1, .states = {{0, "of a log that lost its end"}}});
    run();
    ASSERT_TRUE(before.CheckDurable(7, 1).ok());
  }
  KeptFactors kept(fs, dir.path(), options, clock, logger, observer);
  ASSERT_TRUE(kept.Open().ok());
  kept.Keep("job", {.session_id = 7, .release = 1, .states = {{0, "of the shard that goes on"}}});
  EXPECT_EQ(kept.CheckDurable(7, 1).code(), absl::StatusCode::kAborted);
  run();
  EXPECT_TRUE(kept.CheckDurable(7, 1).ok());
  EXPECT_EQ(*kept.Read(7, 1, 0), "of the shard that goes on");
}

}  // namespace
}  // namespace precondor::recovery
