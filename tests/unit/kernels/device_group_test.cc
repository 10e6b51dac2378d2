// SPDX-License-Identifier: Apache-2.0
// Groups of CPU backends with LocalCollective: what their ranks do together, and what becomes of the others when one
// fails.
#include "kernels/device_group.h"

#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/local_collective.h"
#include "kernels/cpu/staged_collective.h"

namespace precondor {
namespace {

using testing::HasSubstr;

// Longer than anything takes that does not hang.
constexpr absl::Duration kAmple = absl::Seconds(100);

class DeviceGroupTest : public testing::Test {
 protected:
  explicit DeviceGroupTest(int size = 3) {
    std::vector<Backend*> all;
    for (int rank = 0; rank < size; ++rank) {
      backends_.push_back(MakeCpuBackend(CpuBackendOptions()).value());
      all.push_back(backends_.back().get());
    }
    const auto connect =
        [this, local = ConnectLocally(kAmple)](
            const std::vector<Backend*>& backends) -> absl::StatusOr<std::vector<std::unique_ptr<Collective>>> {
      ++connects_;
      if (!connect_error_.ok()) return connect_error_;
      return local(backends);
    };
    group_ = DeviceGroup::Make(all, connect, kAmple).value();
  }

  // The sum over ranks of rank + 1, on all.
  absl::Status Sum(int mine) {
    std::vector<float> sums(group_->size(), 0.0f);
    const absl::Status status = group_->Run(mine, [&](const DeviceGroup::Rank& rank) {
      sums[rank.rank] = static_cast<float>(rank.rank + 1);
      return rank.ranks.AllReduce(DType::kF32, &sums[rank.rank], &sums[rank.rank], 1, rank.timeout);
    });
    const float expected = static_cast<float>(group_->size() * (group_->size() + 1)) / 2;
    if (status.ok()) {
      EXPECT_EQ(sums, std::vector<float>(group_->size(), expected));
    }
    return status;
  }

  std::vector<std::unique_ptr<Backend>> backends_;
  std::atomic<int> connects_ = 0;
  absl::Status connect_error_;
  std::unique_ptr<DeviceGroup> group_;
};

TEST_F(DeviceGroupTest, RunsAllRanksAtOnceAndMineOnTheCallersThread) {
  for (const int mine : {0, 2, 1}) {
    std::vector<std::thread::id> threads(3);
    EXPECT_EQ(group_->Run(mine,
                          [&](const DeviceGroup::Rank& rank) {
                            threads[rank.rank] = std::this_thread::get_id();
                            EXPECT_EQ(&rank.backend, backends_[rank.rank].get());
                            EXPECT_EQ(rank.ranks.rank(), rank.rank);
                            EXPECT_EQ(rank.ranks.size(), 3);
                            EXPECT_EQ(rank.timeout, kAmple);
                            return rank.ranks.Barrier(rank.timeout);
                          }),
              absl::OkStatus());
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(threads[rank] == std::this_thread::get_id(), rank == mine);
    }
    EXPECT_EQ(Sum(mine), absl::OkStatus());
  }
  EXPECT_EQ(connects_, 1);
}

TEST_F(DeviceGroupTest, TakesOneRunAtATimeFromManyThreads) {
  std::atomic<int> inside = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(group_->Run(thread % 3,
                              [&](const DeviceGroup::Rank& rank) {
                                if (rank.rank == 0) {
                                  EXPECT_EQ(inside.fetch_add(1), 0);
                                }
                                const absl::Status met = rank.ranks.Barrier(rank.timeout);
                                if (rank.rank == 0) inside.fetch_sub(1);
                                return met;
                              }),
                  absl::OkStatus());
        EXPECT_EQ(Sum((thread + i) % 3), absl::OkStatus());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(connects_, 1);
}

// Without the abort the others would wait for as long as kAmple is.
TEST_F(DeviceGroupTest, ARankThatFailsWakesTheOthersAndTheNextRunMeetsAgain) {
  for (const int failing : {0, 1, 2}) {
    const absl::Status fault = absl::InternalError(absl::StrCat("device ", failing, " is lost"));
    std::vector<absl::Status> heard(3);
    EXPECT_EQ(group_->Run(1,
                          [&](const DeviceGroup::Rank& rank) {
                            if (rank.rank == failing) return fault;
                            heard[rank.rank] = rank.ranks.Barrier(rank.timeout);
                            return heard[rank.rank];
                          }),
              fault);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == failing) continue;
      EXPECT_EQ(heard[rank].code(), absl::StatusCode::kAborted);
      EXPECT_THAT(std::string(heard[rank].message()), HasSubstr(absl::StrCat("rank ", failing, " failed: device ")));
    }
    EXPECT_EQ(connects_, failing + 1);
    EXPECT_EQ(Sum(failing), absl::OkStatus());
    EXPECT_EQ(connects_, failing + 2);
  }
}

TEST_F(DeviceGroupTest, WhatAllFindAlikeEndsNothing) {
  for (const absl::Status& found : {absl::FailedPreconditionError("not finite"), absl::InvalidArgumentError("shape")}) {
    EXPECT_EQ(group_->Run(0, [&](const DeviceGroup::Rank&) { return found; }), found);
    EXPECT_EQ(Sum(0), absl::OkStatus());
  }
  EXPECT_EQ(connects_, 1);
}

TEST_F(DeviceGroupTest, MeetsAgainAfterRanksThatCalledDifferently) {
  const absl::Status differ = group_->Run(0, [&](const DeviceGroup::Rank& rank) {
    float one = 1;
    return rank.rank == 0 ? rank.ranks.Barrier(rank.timeout)
                          : rank.ranks.AllReduce(DType::kF32, &one, &one, 1, rank.timeout);
  });
  EXPECT_EQ(differ.code(), absl::StatusCode::kInvalidArgument) << differ;
  EXPECT_EQ(Sum(0), absl::OkStatus());
  EXPECT_EQ(connects_, 2);
}

TEST_F(DeviceGroupTest, GivesTheErrorOfConnectAndTriesAgain) {
  connect_error_ = absl::UnavailableError("no NCCL");
  EXPECT_EQ(Sum(0), connect_error_);
  EXPECT_EQ(Sum(1), connect_error_);
  connect_error_ = absl::OkStatus();
  EXPECT_EQ(Sum(2), absl::OkStatus());
  EXPECT_EQ(connects_, 3);
}

TEST_F(DeviceGroupTest, NeedsTwoBackends) {
  const absl::Status refused = DeviceGroup::Make({backends_[0].get()}, ConnectLocally(kAmple), kAmple).status();
  EXPECT_EQ(refused, absl::InvalidArgumentError("group of devices: expected two backends or more, got 1"));
}

TEST(JoinTogetherTest, EndsThoseWhoWaitForOneThatDoesNotCome) {
  const auto rendezvous = LocalRendezvous::Start().value();
  const absl::Status status =
      JoinTogether(3, [&](int rank, const std::atomic<bool>* give_up) -> absl::StatusOr<std::unique_ptr<Collective>> {
        if (rank == 1) return absl::UnavailableError("device 1 is lost");
        return MakeLocalCollective(rendezvous->unique_id(), rank, 3, kAmple, give_up);
      }).status();
  EXPECT_EQ(status, absl::UnavailableError("device 1 is lost"));
}

}  // namespace
}  // namespace precondor
