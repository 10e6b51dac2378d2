// SPDX-License-Identifier: Apache-2.0
#include "kernels/region_copy_queue.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/fake_plane.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

class RegionCopyQueueTest : public ::testing::Test {
 protected:
  void Post(RegionCopyQueue& copier, int name, size_t outstanding) {
    float* const value = &values_[static_cast<size_t>(name)];
    copier.Post({ConstMatrixView(&source_, 1, 1), MatrixView(value, 1, 1)}, outstanding,
                [this, name](const absl::Status& status) {
                  MutexLock lock(mu_);
                  done_.push_back(name);
                  statuses_.push_back(status);
                  changed_.notify_all();
                });
  }
  void Await(size_t count) {
    MutexLock lock(mu_);
    changed_.wait(mu_, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return done_.size() >= count; });
  }

  FakePlane memory_;
  const float source_ = 3;
  std::vector<float> values_ = {0, 0, 0, 0};
  Mutex mu_;
  CondVar changed_;
  std::vector<int> done_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::Status> statuses_ ABSL_GUARDED_BY(mu_);
};

TEST_F(RegionCopyQueueTest, CopiesThatAreExpectedShareOneWait) {
  RegionCopyQueue copier(memory_, absl::Hours(1));
  for (const int name : {0, 1, 2}) Post(copier, name, 3);
  Await(3);
  Post(copier, 3, 1);
  Await(4);
  EXPECT_THAT(memory_.copied, ElementsAre(3, 1));
  MutexLock lock(mu_);
  EXPECT_THAT(done_, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(values_, ElementsAre(3, 3, 3, 3));
}

TEST_F(RegionCopyQueueTest, WaitsForOthersWithABound) {
  RegionCopyQueue copier(memory_, absl::Microseconds(50));
  Post(copier, 0, 144);
  Await(1);
  EXPECT_THAT(memory_.copied, ElementsAre(1));
}

TEST_F(RegionCopyQueueTest, MakesWhatWaitsBeforeItEnds) {
  {
    RegionCopyQueue copier(memory_, absl::Hours(1));
    for (const int name : {0, 1}) Post(copier, name, 144);
  }
  MutexLock lock(mu_);
  EXPECT_THAT(done_, ElementsAre(0, 1));
}

TEST_F(RegionCopyQueueTest, TellsEveryCopyOfAFailure) {
  memory_.refuses = true;
  RegionCopyQueue copier(memory_, absl::Hours(1));
  for (const int name : {0, 1}) Post(copier, name, 2);
  Await(2);
  MutexLock lock(mu_);
  for (const absl::Status& status : statuses_) EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace precondor
