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
#include "tests/support/submit.h"

namespace precondor {

// The answers to one contribution. `result` stays empty until there is an answer.
struct Reply {
  std::optional<absl::StatusOr<bool>> ack;
  std::optional<absl::StatusOr<GradientResult>> result;
  bool accepted() const { return ack.has_value() && ack->ok(); }
  bool duplicate() const { return accepted() && **ack; }
  ErrorReason reason() const { return GetErrorReason(ack->status()); }
  Decision decision() const { return (*result)->decision; }
  std::vector<float> values() const {
    const Payload& bytes = *(*result)->bytes;
    std::vector<float> out(bytes.size() / ByteSize((*result)->tensors[0].dtype));
    DecodeElements((*result)->tensors[0].dtype, bytes.data(), (*result)->tensors[0].scale, absl::MakeSpan(out));
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
    options.make_method = [this](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
      return std::make_unique<FakeMethod>(log, needs_statistics);
    };
    auto made = MakeCpuBackend({});
    PRECONDOR_CHECK(made.ok());
    backend = *std::move(made);
  }

  Shard& MakeShard() {
    shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, observer);
    return *shard;
  }
  uint64_t Holder(uint32_t rank) const { return incarnations.contains(rank) ? incarnations.at(rank) : 1; }
  SessionInstall MakeInstall(uint64_t epoch = 1) const {
    SessionInstall install{.session_id = kSession, .epoch = epoch, .spec = spec, .layers = {}, .members = {}};
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) install.layers.push_back(layer);
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
      install.members.push_back({.rank = rank, .incarnation = Holder(rank)});
    }
    return install;
  }
  void Start() {
    MakeShard();
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
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
  // All elements `value`.
  Payload Filled(const ContributionHeader& header, float value) const {
    Payload payload;
    for (const TensorDesc& tensor : header.tensors) {
      const Payload part =
          EncodeValues(tensor.dtype, std::vector<float>(tensor.dims[0] * tensor.dims[1], value), tensor.scale);
      payload.insert(payload.end(), part.begin(), part.end());
    }
    return payload;
  }
  // Elements that no other contribution has.
  Payload Distinct(const ContributionHeader& header) const {
    std::mt19937_64 random(header.key.step * 1000 + header.key.layer * 100 + header.key.rank * 10 +
                           static_cast<uint64_t>(header.kind));
    std::normal_distribution<float> normal;
    Payload payload;
    for (const TensorDesc& tensor : header.tensors) {
      std::vector<float> values(tensor.dims[0] * tensor.dims[1]);
      for (float& value : values) value = normal(random);
      const Payload part = EncodeValues(tensor.dtype, values, tensor.scale);
      payload.insert(payload.end(), part.begin(), part.end());
    }
    return payload;
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
  std::shared_ptr<Reply> Statistics(uint64_t step, uint32_t rank, float value, uint64_t samples = 1) {
    ContributionHeader header = Header(ContributionKind::kStatistics, step, rank);
    header.samples = samples;
    Payload payload = Filled(header, value);
    return Send(header, std::move(payload));
  }
  std::shared_ptr<Reply> Gradient(uint64_t step, uint32_t rank, float value, uint64_t samples = 1) {
    ContributionHeader header = Header(ContributionKind::kGradient, step, rank);
    header.samples = samples;
    Payload payload = Filled(header, value);
    return Send(header, std::move(payload));
  }
  std::shared_ptr<Reply> Abstain(ContributionKind kind, uint64_t step, uint32_t rank) {
    ContributionHeader header = Header(kind, step, rank);
    header.abstain = true;
    header.tensors.clear();
    return Send(header, {});
  }
  LayerStats StatsOf(uint32_t layer) const { return shard->GetLayerStats("job")->at(layer); }

  SessionSpec spec;
  ShardOptions options;
  bool needs_statistics = true;
  uint64_t epoch = 1;
  std::map<uint32_t, uint64_t> incarnations;  // of ranks that are not held by incarnation 1
  std::shared_ptr<FakeMethodLog> log = std::make_shared<FakeMethodLog>();
  std::unique_ptr<Backend> backend;
  InlineExecutor executor;
  FakeClock clock;
  NullLogger logger;
  Observer observer;
  std::unique_ptr<Shard> shard;
};

}  // namespace precondor
