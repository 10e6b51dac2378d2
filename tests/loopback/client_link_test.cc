// SPDX-License-Identifier: Apache-2.0
// The client against scripted faults: what it sends again, when it gives up, and whose memory it touches.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/wire_bounds.h"
#include "precondor/client.h"
#include "tests/loopback/scripted_server.h"
#include "tests/support/status_matchers.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;
using Script = ScriptedServer::Script;

constexpr uint64_t kSamples = 5;
// Layer 2 takes more than two chunks in f32.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{3, 5}, {8, 2}, {640, 900}};

SessionSpec Spec(DType gradient_dtype = DType::kF32) {
  SessionSpec spec;
  spec.name = "client-test";
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.statistics_dtype = DType::kF32;
  spec.gradient_dtype = gradient_dtype;
  spec.inv_freq = 1;
  for (const auto& [d_out, d_in] : kShapes) {
    spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
  }
  return spec;
}

class Tensor {
 public:
  explicit Tensor(int64_t layer, float value = 0)
      : rows_(kShapes[static_cast<size_t>(layer)].first),
        cols_(kShapes[static_cast<size_t>(layer)].second),
        data_(static_cast<size_t>(rows_ * cols_), value) {}
  static Tensor Ramp(int64_t layer) {
    Tensor out(layer);
    for (size_t i = 0; i < out.data_.size(); ++i) out.data_[i] = static_cast<float>(i % 61) - 30;
    return out;
  }
  MatrixView view() { return MatrixView(data_.data(), rows_, cols_); }
  Tensor Doubled() const {
    Tensor out = *this;
    for (float& value : out.data_) value *= 2;
    return out;
  }
  bool operator==(const Tensor&) const = default;

 private:
  int64_t rows_, cols_;
  std::vector<float> data_;
};

std::unique_ptr<Worker> Join(const ClientOptions& options) {
  auto client = Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  auto worker = (*client)->Join("client-test", {0, 7});
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

absl::Status SendStatistics(Worker& worker, uint64_t step, int64_t layer) {
  const auto [d_out, d_in] = kShapes[static_cast<size_t>(layer)];
  std::vector<float> a(static_cast<size_t>(d_in), 1.5f), g(static_cast<size_t>(d_out), -2.5f);
  return worker.SendStatistics(step, layer, ConstMatrixView(a.data(), 1, d_in), ConstMatrixView(g.data(), 1, d_out),
                               kSamples);
}

// One step of all layers, in place or not; the results must be the doubled gradients.
void RunStep(Worker& worker, uint64_t step, bool in_place) {
  std::vector<Tensor> gradients, outs;
  for (size_t layer = 0; layer < kShapes.size(); ++layer) {
    gradients.push_back(Tensor::Ramp(static_cast<int64_t>(layer)));
    outs.push_back(Tensor(static_cast<int64_t>(layer)));
  }
  const std::vector<Tensor> originals = gradients;
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < kShapes.size(); ++layer) {
    const int64_t index = static_cast<int64_t>(layer);
    ASSERT_TRUE(SendStatistics(worker, step, index).ok());
    futures.push_back(worker.Precondition(
        step, index, {gradients[layer].view(), in_place ? gradients[layer].view() : outs[layer].view()}, kSamples));
  }
  for (size_t layer = 0; layer < kShapes.size(); ++layer) {
    const auto result = futures[layer].Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->decision, Decision::kPreconditioned);
    EXPECT_EQ(result->factor_version, step + 1);
    EXPECT_TRUE(futures[layer].ready());
    EXPECT_TRUE((in_place ? gradients[layer] : outs[layer]) == originals[layer].Doubled()) << "layer " << layer;
  }
}

class ClientDTypeTest : public ::testing::TestWithParam<DType> {};

TEST_P(ClientDTypeTest, CarriesTensorsOfEveryTypeInOneOrManyChunks) {
  ScriptedServer server(Spec(GetParam()));
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, false);
  RunStep(*worker, 1, true);
  ASSERT_TRUE(worker->Flush().ok());
  const auto stored = server.stored();
  EXPECT_EQ(stored.size(), 4 * kShapes.size());
  for (const auto& [key, contribution] : stored) {
    EXPECT_EQ(contribution.times, 1) << key;
    EXPECT_EQ(contribution.header.incarnation(), 7u);
    EXPECT_EQ(contribution.header.samples(), kSamples);
  }
  const Traffic traffic = worker->status().traffic;
  int64_t elements = 0, vectors = 0;
  for (const auto& [d_out, d_in] : kShapes) {
    elements += d_out * d_in;
    vectors += d_out + d_in;
  }
  EXPECT_EQ(traffic.gradient_bytes, 2 * elements * static_cast<int64_t>(ByteSize(GetParam())));
  EXPECT_EQ(traffic.result_bytes, traffic.gradient_bytes);
  EXPECT_EQ(traffic.statistics_bytes, 2 * vectors * 4);
  EXPECT_GT(traffic.overhead_bytes, 0);
  EXPECT_EQ(traffic.reconnects, 0);
}

INSTANTIATE_TEST_SUITE_P(DTypes, ClientDTypeTest, ::testing::Values(DType::kF32, DType::kF16, DType::kBF16));

// A step is 6 contributions: 6 ACKs and 1 + 1 + 3 frames of results; the place runs over all of them.
class ClientReplayTest : public ::testing::TestWithParam<int> {};

TEST_P(ClientReplayTest, ABrokenStreamChangesNoAnswerAndNoByte) {
  for (const bool in_place : {false, true}) {
    ScriptedServer server(Spec());
    server.Change([&](Script& script) { script.break_after_frames = {GetParam(), GetParam() + 2}; });
    const auto worker = Join(Options(server));
    RunStep(*worker, 0, in_place);
    RunStep(*worker, 1, in_place);
    ASSERT_TRUE(worker->Flush().ok());
    for (const auto& [key, contribution] : server.stored()) EXPECT_FALSE(contribution.conflict) << key;
    EXPECT_EQ(server.stored().size(), 4 * kShapes.size());
    EXPECT_EQ(worker->status().traffic.reconnects, 2);
    EXPECT_EQ(server.streams(), 3);
  }
}

INSTANTIATE_TEST_SUITE_P(Places, ClientReplayTest, ::testing::Range(0, 12));

TEST(ClientLinkTest, SurvivesAServerThatGoesAndComesBack) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, true);
  server.Stop();
  std::thread restart([&server] { server.Start(); });
  RunStep(*worker, 1, true);
  restart.join();
  EXPECT_TRUE(worker->Flush().ok());
  EXPECT_GE(worker->status().traffic.reconnects, 1);
}

// Frames that wait for a stream leave in bundles, unless the shard is of a version that takes none.
TEST(ClientLinkTest, BundlesSmallFramesForAShardThatTakesBundles) {
  for (const bool takes_bundles : {true, false}) {
    ScriptedServer server(Spec());
    server.Change([&](Script& script) { script.takes_bundles = takes_bundles; });
    const auto worker = Join(Options(server));
    server.Stop();
    std::vector<Tensor> outs(kShapes.size(), Tensor(0));
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      outs[layer] = Tensor::Ramp(index);
      ASSERT_TRUE(SendStatistics(*worker, 0, index).ok());
      futures.push_back(worker->Precondition(0, index, {outs[layer].view(), outs[layer].view()}, kSamples));
    }
    server.Start();
    for (const PreconditionFuture& future : futures) EXPECT_TRUE(future.Wait().ok());
    EXPECT_EQ(!server.bundles().empty(), takes_bundles);
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      EXPECT_TRUE(outs[layer] == Tensor::Ramp(static_cast<int64_t>(layer)).Doubled()) << "layer " << layer;
    }
  }
}

TEST(ClientLinkTest, GradientsThatMayWaitLeaveTogetherWhenTheCallerWaits) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, true);
  ASSERT_TRUE(worker->Flush().ok());
  const size_t before = server.bundles().size();
  // A timer of the worker can send the first gradient alone in some step.
  for (uint64_t step = 1; step <= 20 && server.bundles().size() == before; ++step) {
    Tensor first = Tensor::Ramp(0), second = Tensor::Ramp(1);
    const auto send = [&](int64_t layer, Tensor& tensor) {
      return worker->Precondition(step, layer, {tensor.view(), tensor.view()}, kSamples, /*more=*/true);
    };
    const std::vector<PreconditionFuture> futures = {send(0, first), send(1, second)};
    if (step % 2 == 0) {
      EXPECT_TRUE(WaitUntil([&] { return futures[1].ready(); }));
    } else {
      EXPECT_TRUE(futures[1].WaitFor(absl::Seconds(20)));
    }
    EXPECT_TRUE(futures[0].Wait().ok());
    EXPECT_TRUE(first == Tensor::Ramp(0).Doubled());
  }
  EXPECT_EQ(server.bundles().size(), before + 1);
}

// The eighth sends them, so that the shard can begin.
TEST(ClientLinkTest, AtMostEightGradientsWait) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, true);
  ASSERT_TRUE(worker->Flush().ok());
  int longest = 0;
  // A timer of the worker can send fewer of them together.
  for (uint64_t first = 1; first < 90 && longest < 8; first += 9) {
    const size_t before = server.bundles().size();
    std::vector<Tensor> tensors(9, Tensor::Ramp(0));
    std::vector<PreconditionFuture> futures;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const MatrixView view = tensors[i].view();
      futures.push_back(worker->Precondition(first + i, 0, {view, view}, kSamples, /*more=*/true));
    }
    for (const PreconditionFuture& future : futures) ASSERT_TRUE(future.Wait().ok());
    const std::vector<int> bundles = server.bundles();
    for (size_t i = before; i < bundles.size(); ++i) longest = std::max(longest, bundles[i]);
  }
  EXPECT_EQ(longest, 8);
}

TEST(ClientLinkTest, KeepsWithinASmallCredit) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.credit_bytes = 100;
    script.chunk_bytes = 777;
  });
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, false);
}

TEST(ClientLinkTest, RetriesWhatTheShardIsNotReadyFor) {
  ScriptedServer server(Spec());
  auto refusals = std::make_shared<int>(4);
  server.Change([&](Script& script) {
    script.refuse = [refusals](const v1::FrameHeader&) {
      if (*refusals == 0) return absl::OkStatus();
      --*refusals;
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive, "not active");
    };
  });
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, false);
  EXPECT_TRUE(worker->Flush().ok());
  EXPECT_EQ(*refusals, 0);
}

TEST(ClientLinkTest, JoinsAgainWhenTheEpochHasChanged) {
  ScriptedServer server(Spec());
  const auto worker = Join(Options(server));
  RunStep(*worker, 0, false);
  EXPECT_EQ(worker->status().epoch, 1u);
  ASSERT_TRUE(worker->ReportStep(0, 0.5, kSamples, true, 0.1).Wait().ok());
  server.BumpEpoch();
  RunStep(*worker, 1, true);
  EXPECT_EQ(worker->status().epoch, 2u);
  EXPECT_EQ(server.joins(), 2);
  EXPECT_EQ(server.last_first_step(), 1u) << "the lowest unfinished step";
  for (const auto& [key, contribution] : server.stored()) {
    EXPECT_EQ(contribution.header.epoch(), contribution.header.step() + 1) << key;
  }
  server.BumpEpoch();
  const auto directive = worker->ReportStep(1, 0.5, kSamples, true, 0.1).Wait();
  ASSERT_TRUE(directive.ok()) << directive.status();
  EXPECT_EQ(worker->status().epoch, 3u);
  EXPECT_TRUE(worker->Flush().ok());
}

TEST(ClientLinkTest, AFencedIncarnationFailsEverythingFromThenOn) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.refuse = [](const v1::FrameHeader&) {
      return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation,
                            "rank 0 is held by incarnation 8");
    };
  });
  const auto worker = Join(Options(server));
  Tensor gradient = Tensor::Ramp(2);
  const Tensor original = gradient;
  const PreconditionFuture first = worker->Precondition(0, 2, {gradient.view(), gradient.view()}, kSamples);
  EXPECT_EQ(GetErrorReason(first.Wait().status()), ErrorReason::kStaleIncarnation);
  EXPECT_TRUE(gradient == original);
  const PreconditionFuture second = worker->Precondition(1, 2, {gradient.view(), gradient.view()}, kSamples);
  EXPECT_EQ(GetErrorReason(second.Wait().status()), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(SendStatistics(*worker, 0, 0)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(worker->Flush()), ErrorReason::kStaleIncarnation);
}

TEST(ClientLinkTest, FlushReportsTheFirstRefusalOnce) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.refuse = [](const v1::FrameHeader& header) {
      if (header.kind() != v1::FRAME_KIND_STATISTICS || header.layer() == 0 || header.abstain())
        return absl::OkStatus();
      return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
                            absl::StrCat("layer ", header.layer(), " has a NaN"));
    };
  });
  const auto worker = Join(Options(server));
  for (int64_t layer = 0; layer < 3; ++layer) ASSERT_TRUE(SendStatistics(*worker, 0, layer).ok());
  EXPECT_THAT(worker->Flush(), ReasonIs(ErrorReason::kNonFinite, HasSubstr("layer 1 has a NaN")));
  EXPECT_TRUE(worker->Flush().ok());
}

TEST(ClientLinkTest, ARefusedGradientFailsItsFutureAndANonFiniteOneSkips) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.refuse = [](const v1::FrameHeader& header) {
      if (header.layer() == 0) return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kConflict, "other bytes");
      if (header.abstain()) return absl::OkStatus();
      return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite, "NaN at 3");
    };
  });
  const auto worker = Join(Options(server));
  Tensor gradient = Tensor::Ramp(0), other = Tensor::Ramp(1);
  EXPECT_THAT(worker->Precondition(0, 0, {gradient.view(), gradient.view()}, kSamples).Wait(),
              ReasonIs(ErrorReason::kConflict));
  const auto skipped = worker->Precondition(0, 1, {other.view(), other.view()}, kSamples).Wait();
  ASSERT_TRUE(skipped.ok());
  EXPECT_EQ(skipped->decision, Decision::kSkip);
  EXPECT_EQ(skipped->reason, "by the script") << "the answer to the abstention that it counts as";
}

TEST(ClientLinkTest, SkipsLeaveTheOutputAlone) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.skip_gradients = true; });
  const auto worker = Join(Options(server));
  Tensor gradient = Tensor::Ramp(2), out(2, 4.0f);
  const Tensor untouched = out;
  const auto result = worker->Precondition(0, 2, {gradient.view(), out.view()}, kSamples).Wait();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->decision, Decision::kSkip);
  EXPECT_EQ(result->reason, "by the script");
  EXPECT_TRUE(out == untouched);
  EXPECT_EQ(worker->AbstainGradient(0, 1).Wait()->decision, Decision::kSkip);
  EXPECT_TRUE(worker->AbstainStatistics(0, 1).ok());
  EXPECT_TRUE(worker->Flush().ok());
  const auto stored = server.stored();
  EXPECT_TRUE(stored.at("S0.1").header.abstain());
  EXPECT_TRUE(stored.at("G0.1").header.abstain());
  EXPECT_EQ(stored.at("G0.1").header.tensors_size(), 0);
}

TEST(ClientLinkTest, AnAbstentionIsNotAnsweredWithWhatAnEarlierProcessHasSent) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.without_tensor = v1::DECISION_PRECONDITIONED; });
  const auto worker = Join(Options(server));
  EXPECT_THAT(worker->AbstainGradient(0, 1).Wait(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("step 0 layer 1: this rank abstained")));
}

TEST(ClientLinkTest, GivesUpAtTheDeadlineAndNamesWhatWasLate) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.silent = true; });
  ClientOptions options = Options(server);
  options.result_timeout = absl::Milliseconds(300);
  const auto worker = Join(options);
  Tensor gradient = Tensor::Ramp(2);
  const Tensor original = gradient;
  const PreconditionFuture future = worker->Precondition(4, 2, {gradient.view(), gradient.view()}, kSamples);
  ASSERT_TRUE(SendStatistics(*worker, 4, 1).ok());
  const auto result = future.Wait();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("step 4 layer 2"));
  EXPECT_EQ(future.Wait().status(), result.status());
  EXPECT_EQ(worker->Flush().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(gradient == original);
}

TEST(ClientLinkTest, DestructionSettlesWhatIsOutstanding) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.silent = true; });
  PreconditionFuture future;
  {
    auto gradient = std::make_unique<Tensor>(Tensor::Ramp(2));
    auto worker = Join(Options(server));
    future = worker->Precondition(0, 2, {gradient->view(), gradient->view()}, kSamples);
    worker->Precondition(0, 0, {gradient->view(), gradient->view()}, kSamples);  // refused for its shape; dropped
    ASSERT_TRUE(SendStatistics(*worker, 0, 1).ok());
    ASSERT_TRUE(server.Await([](const auto& stored) { return stored.size() == 2; }));
    worker.reset();
    gradient.reset();  // no thread may touch it any more
  }
  EXPECT_TRUE(future.ready());
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST(ClientLinkTest, DestructionDoesNotHangWhenTheServerIsGone) {
  auto server = std::make_unique<ScriptedServer>(Spec());
  server->Change([](Script& script) { script.silent = true; });
  auto worker = Join(Options(*server));
  Tensor gradient = Tensor::Ramp(2);
  const PreconditionFuture future = worker->Precondition(0, 2, {gradient.view(), gradient.view()}, kSamples);
  server.reset();
  worker.reset();
  EXPECT_FALSE(future.Wait().ok());
}

TEST(ClientLinkTest, CancelEndsWhatWaitsAndAllThatComes) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.silent = true; });
  const auto worker = Join(Options(server));
  Tensor gradient = Tensor::Ramp(2);
  const Tensor original = gradient;
  const PreconditionFuture future = worker->Precondition(0, 2, {gradient.view(), gradient.view()}, kSamples);
  ASSERT_TRUE(SendStatistics(*worker, 0, 1).ok());
  EXPECT_FALSE(future.WaitFor(absl::ZeroDuration()));
  absl::Status flushed;
  std::thread flush([&] { flushed = worker->Flush(); });
  worker->Cancel();
  flush.join();
  EXPECT_EQ(flushed.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(future.WaitFor(absl::Seconds(30)));
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(gradient == original);
  EXPECT_EQ(SendStatistics(*worker, 0, 0).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(worker->ReportStep(0, 1.0, kSamples, true, 0.1).Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(worker->Leave().code(), absl::StatusCode::kCancelled);
}

// Bytes that the transport cannot send stay in the stream, and the caller's memory with them.
TEST(ClientLinkTest, CancelGivesBackAGradientThatTheShardDoesNotRead) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.stalled = true; });
  const absl::Cleanup go_on = [&server] { server.Change([](Script& script) { script.stalled = false; }); };
  const auto worker = Join(Options(server));
  Tensor gradient = Tensor::Ramp(2);
  const PreconditionFuture future = worker->Precondition(0, 2, {gradient.view(), gradient.view()}, kSamples);
  ASSERT_TRUE(WaitUntil([&] { return worker->status().traffic.gradient_bytes > 0; }));
  worker->Cancel();
  ASSERT_TRUE(future.WaitFor(absl::Seconds(30)));
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST(ClientLinkTest, DroppedFuturesAreStillAnswered) {
  ScriptedServer server(Spec());
  std::vector<Tensor> gradients;  // outlives the worker, since the test does not wait for the answers
  for (int64_t step = 0; step < 20; ++step) gradients.push_back(Tensor::Ramp(1));
  const auto worker = Join(Options(server));
  for (uint64_t step = 0; step < 20; ++step) {
    worker->Precondition(step, 1, {gradients[step].view(), gradients[step].view()}, kSamples);
  }
  EXPECT_TRUE(worker->Flush().ok());
  EXPECT_EQ(server.stored().size(), 20u);
}

TEST(ClientLinkTest, ChecksWhatItCanBeforeSending) {
  SessionSpec spec = Spec();
  spec.inv_freq = 10;
  spec.warmup_steps = 0;
  spec.world_size = 2;
  spec.exchange = ExchangeMode::kDelegate;
  ScriptedServer server(spec);
  const auto worker = Join(Options(server));
  Tensor right = Tensor::Ramp(0), wrong = Tensor::Ramp(1);
  const auto reason = [](const absl::Status& status) { return GetErrorReason(status); };
  const auto precondition = [&](uint64_t step, int64_t layer, MatrixView gradient, MatrixView out) {
    return worker->Precondition(step, layer, {gradient, out}, kSamples).Wait().status();
  };
  EXPECT_EQ(reason(SendStatistics(*worker, 3, 0)), ErrorReason::kNotStatisticStep);
  EXPECT_EQ(reason(worker->AbstainStatistics(3, 0)), ErrorReason::kNotStatisticStep);
  EXPECT_EQ(reason(worker->SendStatistics(10, 0, right.view(), right.view(), 1)), ErrorReason::kShapeMismatch);
  EXPECT_EQ(reason(worker->Precondition(0, 0, {right.view(), right.view()}, 0).Wait().status()),
            ErrorReason::kMalformed);
  EXPECT_EQ(reason(precondition(0, 3, right.view(), right.view())), ErrorReason::kUnknownLayer);
  EXPECT_EQ(reason(precondition(0, -1, right.view(), right.view())), ErrorReason::kUnknownLayer);
  EXPECT_EQ(reason(precondition(0, 0, wrong.view(), right.view())), ErrorReason::kShapeMismatch);
  EXPECT_EQ(reason(precondition(0, 0, right.view(), wrong.view())), ErrorReason::kShapeMismatch);
  EXPECT_EQ(reason(precondition(0, 1, wrong.view(), wrong.view())), ErrorReason::kNotDelegate);
  EXPECT_EQ(reason(worker->AbstainGradient(0, 1).Wait().status()), ErrorReason::kNotDelegate);
  EXPECT_EQ(reason(precondition(101, 0, right.view(), right.view())), ErrorReason::kStepTooFarAhead);
  EXPECT_TRUE(server.stored().empty());
}

TEST(ClientLinkTest, SendsNoStatisticsOfNothing) {
  SessionSpec spec = Spec();
  spec.statistics = StatisticsKind::kCovariance;
  ScriptedServer server(spec);
  const auto worker = Join(Options(server));
  const int64_t d_out = kShapes[0].first, d_in = kShapes[0].second;
  std::vector<float> a(static_cast<size_t>(d_in)), g(static_cast<size_t>(d_out));
  const auto send = [&](int64_t rows, uint64_t samples) {
    return GetErrorReason(worker->SendStatistics(0, 0, ConstMatrixView(a.data(), rows, d_in),
                                                 ConstMatrixView(g.data(), 1, d_out), samples));
  };
  EXPECT_EQ(send(0, kSamples), ErrorReason::kShapeMismatch);
  EXPECT_EQ(send(1, 0), ErrorReason::kMalformed);
  EXPECT_EQ(send(1, kMaxSamples + 1), ErrorReason::kMalformed);
  EXPECT_EQ(send(1, kMaxSamples), ErrorReason::kUnspecified);
  ASSERT_TRUE(worker->Flush().ok());
  EXPECT_EQ(server.stored().size(), 1u);
}

TEST(ClientLinkTest, StampsTheModeOfTheDirectiveAndGrowsItsLease) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.lease_through_step = 60; });
  const auto worker = Join(Options(server));
  ASSERT_TRUE(SendStatistics(*worker, 49, 0).ok());
  EXPECT_EQ(worker->ModeOf(49), Mode::kSecondOrder);
  EXPECT_EQ(worker->ModeOf(50), Mode::kFirstOrder);
  EXPECT_TRUE(worker->NeedsStatistics(49, 0));
  EXPECT_FALSE(worker->NeedsStatistics(50, 0));
  EXPECT_EQ(GetErrorReason(SendStatistics(*worker, 50, 0)), ErrorReason::kNotStatisticStep);
  EXPECT_EQ(GetErrorReason(worker->AbstainStatistics(50, 0)), ErrorReason::kNotStatisticStep);
  EXPECT_EQ(GetErrorReason(worker->AbstainGradient(61, 0).Wait().status()), ErrorReason::kStepTooFarAhead);
  server.Change([](Script& script) { script.lease_through_step = 80; });
  const auto directive = worker->ReportStep(48, 1.0, kSamples, true, 0.1).Wait();
  ASSERT_TRUE(directive.ok());
  EXPECT_EQ(directive->lease_through_step, 80u);
  EXPECT_EQ(directive->next_mode, Mode::kSecondOrder);
  EXPECT_EQ(worker->ReportStep(49, 1.0, kSamples, true, 0.1).Wait()->next_mode, Mode::kFirstOrder);
  EXPECT_TRUE(worker->AbstainGradient(61, 0).Wait().ok());
  ASSERT_TRUE(worker->Flush().ok());
  EXPECT_EQ(server.stored().at("S49.0").header.mode(), v1::MODE_SECOND_ORDER);
  EXPECT_EQ(server.stored().at("G61.0").header.mode(), v1::MODE_FIRST_ORDER);
}

TEST(ClientLinkTest, ARefusalThatNoCallTakesIsToldByALaterReport) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) {
    script.refuse_report = [](const v1::ReportStepRequest& report) {
      return report.step() == 0 ? absl::InvalidArgumentError("no such loss") : absl::OkStatus();
    };
  });
  auto worker = Join(Options(server));
  { const ReportFuture dropped = worker->ReportStep(0, 1, kSamples, true, 0.1); }
  uint64_t step = 1;
  absl::Status told;
  const auto report = [&] { return worker->ReportStep(step, 1, kSamples, true, 0.1); };
  EXPECT_TRUE(WaitUntil([&] {
    told = report().Wait().status();
    step += told.ok();
    return !told.ok();
  }));
  EXPECT_THAT(told.message(), HasSubstr("no such loss"));
  EXPECT_TRUE(report().Wait().ok());
  ++step;
  const ReportFuture last = report();
  worker.reset();
  EXPECT_TRUE(last.WaitFor(absl::InfiniteDuration()));
  EXPECT_TRUE(absl::IsCancelled(last.Wait().status()));
}

TEST(ClientConnectTest, NamesAServerThatIsNotThere) {
  std::string address;
  {
    ScriptedServer server(Spec());
    address = server.address();
  }
  ClientOptions options;
  options.coordinator = address;
  options.connect_timeout = absl::Milliseconds(200);
  EXPECT_THAT(Client::Connect(options), StatusIs(absl::StatusCode::kUnavailable, HasSubstr(address)));
}

TEST(ClientConnectTest, NamesAServerOfAnotherRelease) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.version = "99.0.0"; });
  EXPECT_THAT(Client::Connect(Options(server)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       testing::AllOf(HasSubstr(server.address()), HasSubstr("Precondor 99.0.0"))));
}

TEST(ClientConnectTest, JoinGivesUpWhenTheOthersDoNotCome) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.active = false; });
  ClientOptions options = Options(server);
  options.join_timeout = absl::Milliseconds(100);
  auto client = Client::Connect(options);
  ASSERT_TRUE(client.ok());
  EXPECT_THAT((*client)->Join("client-test", {0, 7}),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("not every other rank")));
}

TEST(ClientConnectTest, CancelEndsTheWaitForTheOthers) {
  ScriptedServer server(Spec());
  server.Change([](Script& script) { script.active = false; });
  const std::unique_ptr<Client> client = Client::Make(Options(server));
  ASSERT_TRUE(client->WaitForServer().ok());
  absl::Status joined;
  std::thread join([&] { joined = client->Join("client-test", {0, 7}).status(); });
  client->Cancel();
  join.join();
  EXPECT_EQ(joined.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(client->WaitForServer().code(), absl::StatusCode::kCancelled);
}

TEST(ClientConnectTest, ControlCallsOutliveAShortAbsence) {
  ScriptedServer server(Spec());
  auto client = Client::Connect(Options(server));
  ASSERT_TRUE(client.ok());
  server.Stop();
  std::thread restart([&server] { server.Start(); });
  const auto worker = (*client)->Join("client-test", {0, 7});
  restart.join();
  EXPECT_TRUE(worker.ok()) << worker.status();
}

}  // namespace
}  // namespace precondor
