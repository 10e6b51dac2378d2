// SPDX-License-Identifier: Apache-2.0
// What a Collective does when a rank does not come, leaves, ends it, or calls something else: every rank gets an error
// soon, and the same one from then on.
#include <atomic>
#include <gmock/gmock.h>
#include <vector>

#include "absl/time/clock.h"

#include "tests/conformance/collective_contract.h"

namespace precondor {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Milliseconds(100);

std::string Message(const absl::Status& status) { return std::string(status.message()); }

absl::Status SumOne(Collective& ranks, absl::Duration timeout) {
  const DeviceBytes buffer(ranks.rank(), Encoded(DType::kF32, {1.0f}));
  return ranks.AllReduce(DType::kF32, buffer.data(), buffer.data(), 1, timeout);
}

void ExpectEnded(Collective& ranks, const absl::Status& why) {
  EXPECT_EQ(ranks.status(), why);
  EXPECT_EQ(SumOne(ranks, kAmple), why);
  EXPECT_EQ(ranks.Barrier(kAmple), why);
  ranks.Abort("once more");
  EXPECT_EQ(ranks.status(), why);
}

// "rank 2" or "ranks 1, 2".
auto NamesRank(int rank) { return ContainsRegex(absl::StrCat("ranks? ([0-9]+, )*", rank, "\\b")); }

TEST_P(CollectiveFaultTest, TimesOutWhenARankDoesNotCome) {
  const int size = GetParam(), late = size - 1;
  std::vector<std::unique_ptr<Collective>> ranks = JoinAll(size);
  std::unique_ptr<Collective> late_rank = std::move(ranks.back());
  ASSERT_NE(late_rank, nullptr);
  ranks.pop_back();
  OnEach(std::move(ranks), [&](Collective& here) {
    const absl::Status status = SumOne(here, kSoon);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(Message(status), HasSubstr("AllReduce of 1 f32"));
    if (World().names_ranks()) {
      EXPECT_THAT(Message(status), NamesRank(late));
    }
    ExpectEnded(here, status);
  });
  const absl::Status status = SumOne(*late_rank, World().names_ranks() ? kAmple : kSoon);
  EXPECT_FALSE(status.ok());
  ExpectEnded(*late_rank, status);
}

TEST_P(CollectiveFaultTest, TellsAllWhenARankAborts) {
  const int size = GetParam();
  OnEachRank([&](Collective& ranks) {
    ASSERT_EQ(SumOne(ranks, kAmple), absl::OkStatus());
    const bool aborts = ranks.rank() == size - 1;
    if (aborts) ranks.Abort("out of paper");
    const absl::Status status = SumOne(ranks, World().names_ranks() || aborts ? kAmple : kSoon);
    if (World().names_ranks() || aborts) {
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
      EXPECT_EQ(Message(status), absl::StrCat("rank ", size - 1, " aborted: out of paper"));
    }
    EXPECT_FALSE(status.ok());
    ExpectEnded(ranks, status);
  });
}

// Only the aborting thread ends this wait.
TEST_P(CollectiveFaultTest, AbortEndsAnOperationUnderWay) {
  std::vector<std::unique_ptr<Collective>> ranks = JoinAll(GetParam());
  Collective& waiting = *ranks.front();
  std::atomic<bool> about_to_wait = false;
  std::thread thread([&] {
    about_to_wait = true;
    const absl::Status status = SumOne(waiting, kAmple);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    ExpectEnded(waiting, status);
  });
  while (!about_to_wait) std::this_thread::yield();
  waiting.Abort("enough");
  thread.join();
  for (const std::unique_ptr<Collective>& rank : ranks) rank->Abort("rank 0 has");
}

TEST_P(CollectiveFaultTest, TakesOneOperationAtATime) {
  const int size = GetParam();
  std::vector<std::unique_ptr<Collective>> ranks = JoinAll(size);
  std::atomic<int> refused = 0, done = 0;
  const auto try_barrier = [&] {
    const absl::Status status = ranks[0]->Barrier(kAmple);
    if (status.ok()) {
      ++done;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      ++refused;
    }
  };
  std::thread first(try_barrier), second(try_barrier);
  while (refused == 0) std::this_thread::yield();
  std::vector<std::thread> others;
  for (int rank = 1; rank < size; ++rank) {
    others.emplace_back([&, rank] { EXPECT_EQ(ranks[rank]->Barrier(kAmple), absl::OkStatus()); });
  }
  for (std::thread* thread : {&first, &second}) thread->join();
  for (std::thread& thread : others) thread.join();
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(done, 1);
  OnEach(std::move(ranks), [](Collective& rank) { EXPECT_EQ(SumOne(rank, kAmple), absl::OkStatus()); });
}

TEST_P(CollectiveFaultTest, TellsAllWhenARankLeaves) {
  if (!World().names_ranks()) GTEST_SKIP() << "this implementation leaves together";
  const int size = GetParam();
  for (int leaver = 0; leaver < size; ++leaver) {
    OnEachRank([&](Collective& ranks) {
      ASSERT_EQ(SumOne(ranks, kAmple), absl::OkStatus());
      if (ranks.rank() == leaver) return;
      const absl::Status status = SumOne(ranks, kAmple);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_EQ(Message(status),
                absl::StrCat("AllReduce of 1 f32 (operation 2): rank ", leaver, " is lost: it closed its connection"));
      ExpectEnded(ranks, status);
    });
  }
}

TEST_P(CollectiveFaultTest, NamesBothCallsWhenRanksDiffer) {
  if (!World().names_ranks()) GTEST_SKIP() << "this implementation does not compare calls";
  const int odd = GetParam() - 1;
  const CollectiveCall sum = {CollectiveKind::kAllReduce, DType::kF32, nullptr, nullptr, 0};
  CollectiveCall count = sum, dtype = sum, kind = sum;
  std::vector<char> bytes(64);
  count.count = 3;
  count.in = count.out = bytes.data();
  dtype.dtype = DType::kBF16;
  kind.kind = CollectiveKind::kAllGather;
  const CollectiveCall from_0 = {CollectiveKind::kBroadcast, DType::kF16, nullptr, nullptr, 0, 0};
  CollectiveCall from_1 = from_0;
  from_1.root = 1;
  struct Case {
    std::vector<CollectiveCall> calls, odd_calls;
    std::string text;  // with $ for the rank that differs
  };
  const Case cases[] = {
      {{sum}, {count}, "rank 0 called AllReduce of 0 f32, rank $ AllReduce of 3 f32"},
      {{sum}, {dtype}, "rank 0 called AllReduce of 0 f32, rank $ AllReduce of 0 bf16"},
      {{sum}, {kind}, "rank 0 called AllReduce of 0 f32, rank $ AllGather of 0 f32"},
      {{sum}, {CollectiveCall{}}, "rank 0 called AllReduce of 0 f32, rank $ Barrier"},
      {{from_0}, {from_1}, "rank 0 called Broadcast of 0 f16 from rank 0, rank $ Broadcast of 0 f16 from rank 1"},
      {{sum, sum},
       {sum},
       "rank 0 called a group of 2 operations that begins with AllReduce of 0 f32, rank $ AllReduce"},
      {{sum, sum, sum},
       {sum, sum, kind},
       "rank 0 called AllReduce of 0 f32 as number 3 of its group, rank $ AllGather of 0 f32"},
  };
  for (const Case& each : cases) {
    std::string text = each.text;
    text.replace(text.find('$'), 1, absl::StrCat(odd));
    OnEachRank([&](Collective& ranks) {
      ASSERT_EQ(SumOne(ranks, kAmple), absl::OkStatus());
      std::vector<char> own = bytes;  // ranks that run at the same time must not share what they write
      std::vector<CollectiveCall> calls = ranks.rank() == odd ? each.odd_calls : each.calls;
      for (CollectiveCall& call : calls) {
        if (call.count > 0) call.in = call.out = own.data();
      }
      const absl::Status status = ranks.Run(calls, kAmple);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(Message(status), HasSubstr("ranks differ in operation 2: " + text));
      ExpectEnded(ranks, status);
    });
  }
}

TEST_P(CollectiveFaultTest, TimesOutWhenARankDoesNotJoin) {
  const int size = GetParam(), missing = size / 2;
  const absl::StatusOr<std::string> id = World().NewId();
  ASSERT_TRUE(id.ok());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == missing) continue;
    threads.emplace_back([&, rank] {
      const absl::Status status = World().Join(*id, rank, size, kSoon).status();
      if (World().names_ranks()) {
        EXPECT_THAT(Message(status), NamesRank(missing));
        // The first to give up is told of as one that left.
        EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
      } else {
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveFaultTest, testing::Values(2, 3, 4));

}  // namespace
}  // namespace precondor
