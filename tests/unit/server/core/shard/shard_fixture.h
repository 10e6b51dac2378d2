// SPDX-License-Identifier: Apache-2.0
// A shard with fakes around it, and workers that hand it contributions.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/session_memory.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/core/shard/shard.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_method.h"
#include "tests/support/inline_executor.h"
#include "tests/support/memory_journal.h"
#include "tests/support/status_matchers.h"
#include "tests/support/submit.h"

namespace precondor {

// The answers to one contribution. `result` stays empty until there is an answer.
struct Reply {
  std::optional<absl::StatusOr<bool>> ack;
  std::optional<absl::StatusOr<GradientResult>> result;
  bool accepted() const { return ack.has_value() && ack->ok(); }
  bool duplicate() const { return accepted() && **ack; }
  ErrorReason reason() const { return GetErrorReason(ack->status()); }
  bool answered() const { return result.has_value(); }

  // The test fails if there is no answer; the second of them also if the answer is an error.
  absl::Status outcome() const {
    EXPECT_TRUE(answered());
    return answered() ? result->status() : absl::OkStatus();
  }
  const GradientResult& answer() const {
    static const GradientResult none;
    const absl::Status status = outcome();
    EXPECT_TRUE(status.ok()) << status;
    return answered() && status.ok() ? **result : none;
  }
  Decision decision() const { return answer().decision; }
  uint64_t version() const { return answer().factor_version; }
  std::vector<float> values() const {
    const GradientResult& found = answer();
    EXPECT_NE(found.bytes, nullptr);
    if (found.bytes == nullptr) return {};
    std::vector<float> out(found.bytes->size() / ByteSize(found.tensors[0].dtype));
    DecodeElements(found.tensors[0].dtype, found.bytes->data(), found.tensors[0].scale, absl::MakeSpan(out));
    return out;
  }
};

inline Payload EncodeValues(DType dtype, const std::vector<float>& values, float scale = 1.0f) {
  Payload bytes(values.size() * ByteSize(dtype));
  EncodeElements(dtype, values, scale, bytes.data());
  return bytes;
}

// The count of session_memory.h for both layers, named "first" and "second", of ShardFixture, and two ranks.
inline constexpr int64_t kTables = kBytesPerSession + 2 * kBytesPerRank + 2 * (kBytesPerTableRow + kBytesPerLayer) +
                                   11 * (kTableNames + kLayerNames) + 2 * 2 * (kBytesPerLayerRank + kBytesPerRequest);

// Counts the updates that workers have had and a shard lacks.
struct LossObserver : Observer {
  void OnUpdatesLost(absl::string_view, int64_t updates) override { lost += updates; }
  int64_t lost = 0;
};

// Two layers, [2, 3] and [3, 2]; every step carries statistics unless a test changes the spec before Start.
class ShardFixture : public ::testing::Test {
 protected:
  static constexpr uint64_t kSession = 7;

  ShardFixture() {
    spec.name = "job";
    spec.world_size = 2;
    spec.sketches = 1;
    spec.inv_freq = 1;
    spec.warmup_steps = 0;
    spec.statistics_dtype = DType::kF32;
    spec.method.name = "fake";
    spec.layers = {{.name = "first", .d_out = 2, .d_in = 3, .has_bias = false},
                   {.name = "second", .d_out = 3, .d_in = 2, .has_bias = false}};
    options.capacity_bytes = int64_t{1} << 30;
    UseFakeMethod();
    auto made = MakeCpuBackend({});
    PRECONDOR_CHECK(made.ok());
    backend = *std::move(made);
  }

  void UseFakeMethod(bool takes_covariances = false) {
    options.make_method = [=, this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
      return std::make_unique<FakeMethod>(log, needs_statistics, takes_covariances);
    };
  }
  Shard& MakeShard() { return MakeShard(observer); }
  Shard& MakeShard(Observer& hears) {
    shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, hears);
    return *shard;
  }
  uint64_t Holder(uint32_t rank) const { return incarnations.contains(rank) ? incarnations.at(rank) : 1; }
  SessionInstall MakeInstall(uint64_t epoch = 1) const {
    SessionInstall install{.session_id = kSession, .epoch = epoch, .spec = spec, .layers = {}, .members = {}};
    install.rollback_epoch = last_rollback.epoch;
    install.rollback_step = last_rollback.step;
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) install.layers.push_back(layer);
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
      install.members.push_back({.rank = rank, .incarnation = Holder(rank)});
    }
    return install;
  }
  void Start() { Start(observer); }
  void Start(Observer& hears) {
    MakeShard(hears);
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  }
  // Another shard, with what the journal has.
  void ComeBack(const MemoryJournal& journal) {
    MakeShard();
    journal.Restore(*shard);
    ASSERT_TRUE(shard->replay().Finish().empty());
  }
  // Begins an epoch in which other processes hold these ranks, and begin at `first_step`; with `rollback_step` the job
  // goes back to it.
  void Replace(const std::vector<uint32_t>& ranks, uint64_t first_step,
               std::optional<uint64_t> rollback_step = std::nullopt) {
    ++epoch;
    for (const uint32_t rank : ranks) incarnations[rank] = Holder(rank) + 1;
    if (rollback_step.has_value()) last_rollback = {.epoch = epoch, .step = *rollback_step};
    SessionInstall install = MakeInstall(epoch);
    for (const uint32_t rank : ranks) install.members[rank].first_step = first_step;
    const absl::Status installed = shard->Install(install).status();
    ASSERT_TRUE(installed.ok()) << installed;
  }
  // The rank has `factor_version` updates and the answers to the steps before `next_step`, and keeps what it sent for
  // `step`. Returns how many updates are lost.
  absl::StatusOr<uint64_t> Resume(uint64_t step, uint32_t rank, uint64_t factor_version, uint64_t next_step) {
    return shard->data_plane().Resume({.key = Header(ContributionKind::kGradient, step, rank).key,
                                       .factor_version = factor_version,
                                       .next_step = next_step});
  }
  absl::StatusOr<uint64_t> Resume(uint64_t step, uint32_t rank, uint64_t factor_version) {
    return Resume(step, rank, factor_version, step);
  }

  ContributionHeader Header(ContributionKind kind, uint64_t step, uint32_t rank, uint32_t layer = 0) const {
    ContributionHeader header;
    header.key = {.session_id = kSession,
                  .epoch = epoch,
                  .step = step,
                  .layer = layer,
                  .rank = rank,
                  .incarnation = Holder(rank)};
    header.kind = kind;
    const LayerSpec& shape = spec.layers[layer];
    if (kind == ContributionKind::kPull) {
      header.samples = 0;
    } else if (kind == ContributionKind::kGradient) {
      header.tensors = {{.dtype = spec.gradient_dtype, .dims = {shape.d_out, shape.d_in}, .scale = 1.0f}};
    } else {
      // One row is fewer elements than the packed triangle.
      const bool covariance = StatisticsOf(spec, layer) == StatisticsKind::kCovariance;
      const int64_t q = covariance ? 1 : VectorsPerWorker(spec, layer);
      header.tensors = {{.dtype = spec.statistics_dtype, .dims = {q, shape.d_in}, .scale = 1.0f},
                        {.dtype = spec.statistics_dtype, .dims = {q, shape.d_out}, .scale = 1.0f}};
    }
    return header;
  }
  static Payload PayloadOf(const ContributionHeader& header, absl::FunctionRef<float()> next_element) {
    Payload payload;
    for (const TensorDesc& tensor : header.tensors) {
      std::vector<float> values(tensor.dims[0] * tensor.dims[1]);
      for (float& value : values) value = next_element();
      const Payload part = EncodeValues(tensor.dtype, values, tensor.scale);
      payload.insert(payload.end(), part.begin(), part.end());
    }
    return payload;
  }
  static Payload Filled(const ContributionHeader& header, float value) {
    return PayloadOf(header, [=] { return value; });
  }
  // Elements that no other contribution has.
  static Payload Distinct(const ContributionHeader& header) {
    std::mt19937_64 random(header.key.step * 1000 + header.key.layer * 100 + header.key.rank * 10 +
                           static_cast<uint64_t>(header.kind));
    std::normal_distribution<float> normal;
    return PayloadOf(header, [&] { return normal(random); });
  }

  // The reply's result arrives later when the step is not complete yet.
  std::shared_ptr<Reply> Send(const ContributionHeader& header, Payload payload) {
    auto reply = std::make_shared<Reply>();
    AckFn ack = [reply](absl::StatusOr<bool> status) {
      EXPECT_FALSE(reply->ack.has_value()) << "acknowledged twice";
      reply->ack = std::move(status);
    };
    ResultFn result = [reply](absl::StatusOr<GradientResult> answer) {
      EXPECT_TRUE(reply->accepted()) << "a result before an OK acknowledgement";
      EXPECT_FALSE(reply->result.has_value()) << "answered twice";
      reply->result = std::move(answer);
    };
    SubmitTo(*shard, header, std::move(payload), ack, result);
    return reply;
  }
  // Returns the status of a header's admission, for a payload of so many bytes.
  absl::Status Admission(const ContributionHeader& header, uint64_t bytes) {
    return shard->data_plane().AdmitContribution(header, bytes).status();
  }
  std::shared_ptr<Reply> SendFilled(ContributionHeader header, float value, uint64_t samples = 1) {
    header.samples = samples;
    return Send(header, Filled(header, value));
  }
  std::shared_ptr<Reply> Statistics(uint64_t step, uint32_t rank, float value, uint64_t samples = 1) {
    return SendFilled(Header(ContributionKind::kStatistics, step, rank), value, samples);
  }
  std::shared_ptr<Reply> Gradient(uint64_t step, uint32_t rank, float value, uint64_t samples = 1) {
    return SendFilled(Header(ContributionKind::kGradient, step, rank), value, samples);
  }
  std::shared_ptr<Reply> Abstain(ContributionKind kind, uint64_t step, uint32_t rank) {
    ContributionHeader header = Header(kind, step, rank);
    header.abstain = true;
    header.tensors.clear();
    return Send(header, {});
  }
  // Equal statistics of all ranks, all elements `value`.
  void AllStatistics(uint64_t step, float value = 1) {
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) Statistics(step, rank, value);
  }
  // The gradients of ranks 0, 1, ...; the reply to the last one.
  std::shared_ptr<Reply> Gradients(uint64_t step, const std::vector<float>& values) {
    std::shared_ptr<Reply> last;
    for (uint32_t rank = 0; rank < values.size(); ++rank) last = Gradient(step, rank, values[rank]);
    return last;
  }
  // Statistics of all ranks, and the gradients of those that send one: the replies to these.
  std::vector<std::shared_ptr<Reply>> SendStep(uint64_t step) {
    AllStatistics(step);
    std::vector<std::shared_ptr<Reply>> gradients;
    const int64_t senders = spec.exchange == ExchangeMode::kDelegate ? 1 : spec.world_size;
    for (int64_t rank = 0; rank < senders; ++rank) gradients.push_back(Gradient(step, static_cast<uint32_t>(rank), 1));
    return gradients;
  }
  // All ranks' contributions to a step of every layer, by threads: the layers' answers.
  std::vector<GradientResult> RunStep(Shard& on, Executor& by, uint64_t step) const {
    std::vector<absl::StatusOr<GradientResult>> results(spec.layers.size());
    const AckFn ack = [](const absl::StatusOr<bool>& taken) { EXPECT_TRUE(taken.ok()) << taken.status(); };
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
        if (IsStatisticStep(spec, step)) {
          const ContributionHeader statistics = Header(ContributionKind::kStatistics, step, rank, layer);
          SubmitTo(on, statistics, Distinct(statistics), ack);
        }
        const ContributionHeader gradient = Header(ContributionKind::kGradient, step, rank, layer);
        SubmitTo(on, gradient, Distinct(gradient), ack, [&results, rank, layer](absl::StatusOr<GradientResult> result) {
          if (rank == 0) results[layer] = std::move(result);
        });
      }
    }
    by.Drain();
    std::vector<GradientResult> answers;
    for (absl::StatusOr<GradientResult>& result : results) {
      EXPECT_TRUE(result.ok()) << result.status();
      answers.push_back(result.ok() ? *std::move(result) : GradientResult());
    }
    return answers;
  }
  LayerStats StatsOf(uint32_t layer) const { return shard->GetLayerStats("job")->at(layer); }

  SessionSpec spec;
  ShardOptions options;
  bool needs_statistics = true;
  uint64_t epoch = 1;
  std::map<uint32_t, uint64_t> incarnations;  // of ranks that are not held by incarnation 1
  struct {
    uint64_t epoch = 0;
    uint64_t step = 0;
  } last_rollback;  // of all installs
  std::shared_ptr<FakeMethodLog> log = std::make_shared<FakeMethodLog>();
  std::unique_ptr<Backend> backend;
  InlineExecutor executor;
  FakeClock clock;
  NullLogger logger;
  Observer observer;
  std::unique_ptr<Shard> shard;
};

}  // namespace precondor
