// SPDX-License-Identifier: Apache-2.0
// Workers' side of a communicator against a shard that is written out here, from docs/collective.md.
#include "client/cpp/src/worker_collective_session.h"

#include <condition_variable>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cpu/local_collective.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kAmple = absl::Minutes(1);
constexpr int kRanks = 2;

// Two layers of 6 elements, each a bucket of its own, the second first.
class Rank {
 public:
  explicit Rank(int rank)
      : plane_(WorkerCollectiveSession::Options{.what = absl::StrCat("rank ", rank),
                                                .rank = rank,
                                                .world_size = kRanks,
                                                .layers = {{"a", 2, 3}, {"b", 3, 2}},
                                                .longest = kAmple},
               Hooks()) {}
  WorkerCollectiveSession& plane() { return plane_; }
  PlaneRendezvous rendezvous;

  bool Offer(uint64_t step, uint32_t layer, float value, uint64_t samples) {
    auto item = std::make_shared<Contribution>();
    item->id = {v1::FRAME_KIND_GRADIENT, step, layer};
    item->samples = samples;
    auto values = std::make_shared<std::vector<float>>(6, value);
    item->payload = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values->data()), 24);
    item->payload_owner = values;
    return plane_.Offer(item);
  }
  bool OfferAll(uint64_t step, float value, uint64_t samples) {
    return Offer(step, 0, value, samples) && Offer(step, 1, value, samples);
  }
  // "a5.0 8" for an answer of step 5 layer 0 whose elements are 8, "g3.1" for what is given back.
  std::string Next() {
    MutexLock lock(mu_);
    const auto until = absl::ToChronoTime(absl::Now() + kAmple);
    if (!changed_.wait_until(mu_, until, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !events_.empty(); })) {
      return "nothing";
    }
    std::string event = events_.front();
    events_.erase(events_.begin());
    return event;
  }

 private:
  WorkerCollectiveSession::Hooks Hooks() {
    WorkerCollectiveSession::Hooks hooks;
    hooks.ask = [this](uint64_t) -> absl::StatusOr<PlaneRendezvous> { return rendezvous; };
    hooks.decline = [this](uint64_t, const absl::Status& why) { Note(absl::StrCat("declined: ", why.message())); };
    hooks.answered = [this](const WorkerCollectiveSession::Item& item, const wire::PlaneAnswer&,
                            const wire::ReceivedBytes& values) {
      std::vector<float> floats(values.size() / sizeof(float));
      values.CopyTo(floats.data());
      EXPECT_EQ(floats, std::vector<float>(6, floats[0]));
      Note(absl::StrCat("a", item->id.step, ".", item->id.layer, " ", floats[0]));
    };
    hooks.give_back = [this](const std::vector<ContributionId>& ids) {
      for (const ContributionId& id : ids) Note(absl::StrCat("g", id.step, ".", id.layer));
    };
    return hooks;
  }
  void Note(std::string event) {
    MutexLock lock(mu_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }

  Mutex mu_;
  CondVar changed_;
  std::vector<std::string> events_ ABSL_GUARDED_BY(mu_);
  WorkerCollectiveSession plane_;  // last: its hooks use the others
};

// Answers each sum with itself. `steps` of them, then it leaves; what the ranks' hellos and first offers said.
struct Shard {
  std::vector<uint64_t> first_steps;
  std::vector<uint64_t> offered_steps;
  absl::Status status;

  void Run(const std::string& unique_id, int steps) {
    auto joined = MakeLocalCollective(unique_id, kRanks, kRanks + 1, kAmple);
    if (!joined.ok()) {
      status = joined.status();
      return;
    }
    Collective& group = **joined;
    std::vector<float> mine(4), all(4 * (kRanks + 1));
    status = group.AllGather(DType::kF32, mine.data(), all.data(), 4, kAmple);
    for (int rank = 0; rank < kRanks && status.ok(); ++rank) {
      first_steps.push_back(
          *wire::DecodePlaneHello(wire::FromPlaneElements(absl::MakeSpan(all).subspan(4 * rank, 4), 16)));
    }
    const std::vector<float> zeros(6);
    for (int step = 0; step < steps && status.ok(); ++step) {
      std::vector<std::vector<float>> sums(2, std::vector<float>(6));
      for (std::vector<float>& sum : sums) {
        const size_t width = 6;  // 13 + 9 bytes
        std::vector<float> offer(width), offers(width * (kRanks + 1));
        status.Update(group.AllGather(DType::kF32, offer.data(), offers.data(), width, kAmple));
        if (!status.ok()) return;
        uint64_t number = 0;
        std::memcpy(&number, offers.data(), sizeof(number));
        offered_steps.push_back(number);
        status.Update(group.Reduce(DType::kF32, zeros.data(), sum.data(), 6, kRanks, kAmple));
      }
      for (std::vector<float>& sum : sums) {
        const std::string outcome = wire::EncodePlaneAnswer(
            {.decision = Decision::kIdentity, .factor_version = 0, .inner_product = 0, .reason = ""});
        std::vector<float> words(32);
        std::memcpy(words.data(), outcome.data(), outcome.size());
        const CollectiveCall calls[] = {
            {CollectiveKind::kBroadcast, DType::kF32, words.data(), words.data(), 32, kRanks},
            {CollectiveKind::kBroadcast, DType::kF32, sum.data(), sum.data(), 6, kRanks}};
        status.Update(group.Run(calls, kAmple));
      }
    }
    group.Abort("done");
  }
};

class WorkerCollectiveSessionTest : public ::testing::Test {
 protected:
  // The rendezvous is not complete before the shard comes.
  void Begin(uint64_t epoch) {
    Open();
    for (Rank* rank : {&first_, &second_}) {
      rank->rendezvous = Rendezvous();
      rank->plane().BeginEpoch(epoch);
    }
  }
  void Open() {
    auto started = LocalRendezvous::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    rendezvous_ = *std::move(started);
  }
  PlaneRendezvous Rendezvous() const {
    return {.transport = "local", .unique_id = rendezvous_->unique_id(), .timeout = kAmple, .buckets = {{1}, {0}}};
  }
  void StartShard(int steps) {
    thread_ = std::thread([this, steps] { shard_.Run(rendezvous_->unique_id(), steps); });
  }
  ~WorkerCollectiveSessionTest() override {
    if (thread_.joinable()) thread_.join();
  }

  std::unique_ptr<LocalRendezvous> rendezvous_;
  Rank first_{0}, second_{1};
  Shard shard_;
  std::thread thread_;
};

TEST_F(WorkerCollectiveSessionTest, WeighsBySamplesAndAnswersInTheOrderOfBuckets) {
  Begin(1);
  StartShard(1);
  EXPECT_TRUE(first_.OfferAll(0, 4.0f, 1));
  EXPECT_TRUE(second_.OfferAll(0, 8.0f, 3));
  for (Rank* rank : {&first_, &second_}) {
    EXPECT_EQ(rank->Next(), "a0.1 7");
    EXPECT_EQ(rank->Next(), "a0.0 7");
  }
}

TEST_F(WorkerCollectiveSessionTest, BeginsWithTheGreatestFirstStepAndGivesTheOthersBack) {
  EXPECT_FALSE(first_.Offer(4, 0, 1.0f, 1)) << "no epoch yet: over gRPC";
  Begin(1);
  EXPECT_FALSE(first_.Offer(4, 1, 1.0f, 1)) << "the rest of that step too";
  EXPECT_TRUE(second_.OfferAll(3, 1.0f, 1));
  StartShard(1);
  EXPECT_EQ(second_.Next(), "g3.0");
  EXPECT_EQ(second_.Next(), "g3.1");
  EXPECT_FALSE(second_.OfferAll(4, 1.0f, 1));
  EXPECT_TRUE(first_.OfferAll(5, 1.0f, 1));
  EXPECT_TRUE(second_.OfferAll(5, 3.0f, 1));
  EXPECT_EQ(first_.Next(), "a5.1 2");
  EXPECT_EQ(second_.Next(), "a5.1 2");
  thread_.join();
  EXPECT_THAT(shard_.first_steps, ::testing::ElementsAre(5, 0));
  EXPECT_THAT(shard_.offered_steps, ::testing::ElementsAre(5, 5));
}

TEST_F(WorkerCollectiveSessionTest, RanksAtDifferentStepsEndIt) {
  Begin(1);
  StartShard(1);
  EXPECT_TRUE(first_.OfferAll(0, 1.0f, 1));
  EXPECT_TRUE(second_.OfferAll(1, 1.0f, 1));
  EXPECT_EQ(first_.Next(), "g0.0");
  EXPECT_EQ(second_.Next(), "g1.0");
  for (Rank* rank : {&first_, &second_}) EXPECT_FALSE(rank->plane().status().ok());
  EXPECT_FALSE(first_.Offer(2, 0, 1.0f, 1)) << "until another epoch";
}

TEST_F(WorkerCollectiveSessionTest, ANewEpochGivesBackWhatIsHeldAndBeginsAfterIt) {
  first_.rendezvous.transport = "carrier pigeon";
  first_.plane().BeginEpoch(1);
  EXPECT_THAT(first_.Next(),
              HasSubstr("declined: expected a communicator of kind \"local\" or \"nccl\", got \"carrier pigeon\""));
  Begin(2);
  StartShard(1);
  EXPECT_TRUE(first_.OfferAll(7, 4.0f, 1));
  EXPECT_TRUE(second_.OfferAll(7, 8.0f, 1));
  EXPECT_EQ(first_.Next(), "a7.1 6");
  EXPECT_EQ(first_.Next(), "a7.0 6");
  EXPECT_EQ(second_.Next(), "a7.1 6");
  EXPECT_TRUE(first_.plane().BeginEpoch(2).empty()) << "the same";
  EXPECT_EQ(second_.Next(), "a7.0 6");
  Open();
  second_.rendezvous = Rendezvous();
  EXPECT_TRUE(second_.plane().BeginEpoch(3).empty());
  EXPECT_TRUE(second_.Offer(8, 0, 1.0f, 1));
  const std::vector<ContributionId> held = second_.plane().BeginEpoch(4);
  ASSERT_EQ(held.size(), 1u);
  EXPECT_EQ(held[0].step, 8u);
  second_.plane().Leave();
  EXPECT_FALSE(second_.Offer(9, 0, 1.0f, 1));
  EXPECT_EQ(second_.plane().status().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace precondor
