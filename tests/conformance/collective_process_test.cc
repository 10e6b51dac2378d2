// SPDX-License-Identifier: Apache-2.0
// LocalCollective between processes: the bits that threads get, and what is left of a communicator when a process is
// killed or stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <signal.h>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/cpu/local_collective.h"
#include "tests/conformance/collective_rank_work.h"
#include "tests/support/child_process.h"

namespace precondor {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int kSize = 3;

// Ranks as processes, all of one communicator; each as `what` says.
std::vector<std::unique_ptr<ChildProcess>> StartRanks(LocalRendezvous& rendezvous, int timeout_ms,
                                                      const std::string& what) {
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{COLLECTIVE_RANK, rendezvous.unique_id(),
                                                                            absl::StrCat(rank), absl::StrCat(kSize),
                                                                            absl::StrCat(timeout_ms), what}));
  }
  return ranks;
}

std::string Line(ChildProcess& process) { return process.ReadLine().value_or("(no line)"); }

std::unique_ptr<LocalRendezvous> Rendezvous() {
  absl::StatusOr<std::unique_ptr<LocalRendezvous>> started = LocalRendezvous::Start();
  EXPECT_TRUE(started.ok()) << started.status();
  return *std::move(started);
}

TEST(CollectiveProcessTest, GivesProcessesTheBitsThatThreadsGet) {
  const std::unique_ptr<LocalRendezvous> for_threads = Rendezvous(), for_processes = Rendezvous();
  const std::vector<std::unique_ptr<ChildProcess>> processes = StartRanks(*for_processes, 100000, "work");
  std::vector<std::string> expected(kSize);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const auto ranks = MakeLocalCollective(for_threads->unique_id(), rank, kSize, absl::Seconds(100));
      ASSERT_TRUE(ranks.ok()) << ranks.status();
      std::ostringstream out;
      ASSERT_EQ(RankWork(**ranks, absl::Seconds(100), out), absl::OkStatus());
      expected[rank] = out.str();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kSize; ++rank) {
    for (const absl::string_view line : absl::StrSplit(expected[rank], '\n', absl::SkipEmpty())) {
      EXPECT_EQ(Line(*processes[rank]), line) << "rank " << rank;
    }
    EXPECT_EQ(Line(*processes[rank]), "OK") << "rank " << rank;
  }
}

TEST(CollectiveProcessTest, NamesAProcessThatIsKilledInTheMiddle) {
  for (int victim = 0; victim < kSize; ++victim) {
    const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
    const std::vector<std::unique_ptr<ChildProcess>> ranks = StartRanks(*rendezvous, 100000, "repeat");
    for (const auto& rank : ranks) ASSERT_EQ(Line(*rank), "running");
    ranks[victim]->Signal(SIGKILL);
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank == victim) continue;
      const std::string status = Line(*ranks[rank]);
      EXPECT_THAT(status, StartsWith("UNAVAILABLE: AllReduce of 1048576 f32 (operation "));
      EXPECT_THAT(status, HasSubstr(absl::StrCat("rank ", victim, " is lost")));
      EXPECT_EQ(Line(*ranks[rank]), status) << "the next operation";
    }
  }
}

// A stopped process keeps its connections: only the time-out tells. A rank that got what the victim sent last waits for
// the one that did not get its own, too.
TEST(CollectiveProcessTest, TimesOutOnAProcessThatIsStopped) {
  constexpr int kVictim = 1;
  const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  const std::vector<std::unique_ptr<ChildProcess>> ranks = StartRanks(*rendezvous, 3000, "repeat");
  for (const auto& rank : ranks) ASSERT_EQ(Line(*rank), "running");
  ranks[kVictim]->Signal(SIGSTOP);
  for (const int rank : {0, 2}) {
    const std::string status = Line(*ranks[rank]);
    EXPECT_THAT(status, StartsWith("DEADLINE_EXCEEDED: AllReduce of 1048576 f32 (operation "));
    EXPECT_THAT(status, ContainsRegex("timed out waiting for ranks? (0, )?1(, 2)?$"));
    EXPECT_EQ(Line(*ranks[rank]), status) << "the next operation";
  }
  ranks[kVictim]->Signal(SIGCONT);
  const std::string status = Line(*ranks[kVictim]);
  EXPECT_THAT(status, StartsWith("DEADLINE_EXCEEDED: ")) << "what the others found, or its own time-out";
  EXPECT_EQ(Line(*ranks[kVictim]), status);
}

TEST(CollectiveProcessTest, NamesRanksThatNeverJoin) {
  const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  ChildProcess rank({COLLECTIVE_RANK, rendezvous->unique_id(), "1", "3", "200", "work"});
  EXPECT_EQ(Line(rank), "DEADLINE_EXCEEDED: joining: rank 1 of 3 timed out waiting for ranks 0, 2");
}

TEST(LocalRendezvousTest, EndsForAllWhenRanksDisagreeOnTheSize) {
  const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = MakeLocalCollective(rendezvous->unique_id(), rank, 3 + rank, absl::Seconds(100)).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(statuses[0], statuses[1]);
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(statuses[0].message()),
              testing::AnyOf(HasSubstr("rank 1 expects 4 ranks, those before it 3"),
                             HasSubstr("rank 0 expects 3 ranks, those before it 4")));
}

TEST(LocalRendezvousTest, EndsForAllWhenARankComesTwice) {
  const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  const auto join = [&] {
    const absl::Status status = MakeLocalCollective(rendezvous->unique_id(), 1, 2, absl::Seconds(100)).status();
    EXPECT_EQ(status, absl::InvalidArgumentError("joining: rank 1 of 2 came twice"));
  };
  std::thread other(join);
  join();
  other.join();
  // It stays so for who comes later.
  EXPECT_EQ(MakeLocalCollective(rendezvous->unique_id(), 0, 2, absl::Seconds(100)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(LocalRendezvousTest, TellsLatecomersThatAllAreThere) {
  const std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  EXPECT_TRUE(MakeLocalCollective(rendezvous->unique_id(), 0, 1, absl::Seconds(100)).ok());
  EXPECT_EQ(MakeLocalCollective(rendezvous->unique_id(), 0, 1, absl::Seconds(100)).status(),
            absl::FailedPreconditionError("joining: all 1 ranks have joined already"));
}

TEST(LocalRendezvousTest, SaysThatItIsGone) {
  std::unique_ptr<LocalRendezvous> rendezvous = Rendezvous();
  const std::string id = rendezvous->unique_id();
  rendezvous.reset();
  EXPECT_EQ(MakeLocalCollective(id, 0, 2, absl::Seconds(100)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace precondor
