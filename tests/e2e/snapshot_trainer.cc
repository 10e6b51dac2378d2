// SPDX-License-Identifier: Apache-2.0
// A training job for tests that start and end it as a process. It writes its weights to CHECKPOINTS/weights-<step>
// where the service's directive says that a snapshot is taken, and at its end. All ranks have the same statistics and
// gradients, so that 1, 2 and 4 of them have equal weights.
//
// Usage: snapshot_trainer COORDINATOR FIRST_STEP END_STEP CHECKPOINTS [WORLD_SIZE]
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr int64_t kRows = 6, kCols = 5;
constexpr size_t kElements = kRows * kCols;
constexpr size_t kLayers = 7;
constexpr float kRate = 0.05f;

using Weights = std::vector<std::vector<float>>;  // by layer

SessionSpec MakeSpec(int32_t world_size) {
  SessionSpec spec;
  spec.name = "job";
  spec.world_size = world_size;
  spec.statistics = StatisticsKind::kMean;
  spec.inv_freq = 2;
  spec.warmup_steps = 0;
  spec.method.options["rank"] = 4.0;
  for (size_t i = 0; i < kLayers; ++i) spec.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
  return spec;
}

std::string PathOf(const std::string& checkpoints, uint64_t step) {
  return absl::StrCat(checkpoints, "/weights-", step);
}

absl::Status Write(const std::string& path, const Weights& weights) {
  std::ofstream file(path, std::ios::binary);
  for (const std::vector<float>& layer : weights) {
    file.write(reinterpret_cast<const char*>(layer.data()), kElements * sizeof(float));
  }
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

absl::StatusOr<Weights> Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Weights weights(kLayers, std::vector<float>(kElements));
  for (std::vector<float>& layer : weights) {
    file.read(reinterpret_cast<char*>(layer.data()), kElements * sizeof(float));
  }
  if (!file.good()) return absl::NotFoundError(absl::StrCat(path, ": expected ", kLayers * kElements, " floats"));
  return weights;
}

absl::Status Step(Worker& worker, uint64_t step, Weights& weights) {
  Weights answers(kLayers, std::vector<float>(kElements));
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const auto index = static_cast<int64_t>(layer);
    if (worker.NeedsStatistics(step, index)) {
      const std::vector<float> a(kCols, weights[layer][0] + 0.1f * static_cast<float>(step % 7));
      const std::vector<float> g(kRows, weights[layer][1] + 0.2f * static_cast<float>(layer));
      PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, index, ConstMatrixView(a.data(), 1, kCols),
                                                      ConstMatrixView(g.data(), 1, kRows), 1));
    }
    for (size_t i = 0; i < kElements; ++i) {
      answers[layer][i] = weights[layer][i] * std::sin(static_cast<float>(step * 7 + layer * 3 + i + 1));
    }
    const MatrixView view(answers[layer].data(), kRows, kCols);
    futures.push_back(worker.Precondition(step, index, {view, view}, 1));
  }
  for (size_t layer = 0; layer < kLayers; ++layer) {
    PRECONDOR_RETURN_IF_ERROR(futures[layer].Wait().status());
    for (size_t i = 0; i < kElements; ++i) weights[layer][i] -= kRate * answers[layer][i];
  }
  return absl::OkStatus();
}

// One rank's life; `weights` are those of the end.
absl::Status TrainRank(Client& client, uint32_t rank, uint64_t first_step, uint64_t end_step,
                       const std::string& checkpoints, Weights& weights) {
  const auto incarnation = static_cast<uint64_t>(absl::GetCurrentTimeNanos());
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                             client.Join("job", {.rank = rank, .incarnation = incarnation, .first_step = first_step}));
  for (uint64_t step = first_step; step < end_step; ++step) {
    PRECONDOR_RETURN_IF_ERROR(Step(*worker, step, weights));
    PRECONDOR_ASSIGN_OR_RETURN(const StepDirective directive, worker->ReportStep(step, 1.0, 1, true, 0.1).Wait());
    if (directive.snapshot_at != step + 1 || rank != 0) continue;
    PRECONDOR_RETURN_IF_ERROR(Write(PathOf(checkpoints, step + 1), weights));
  }
  return worker->Flush();
}

absl::Status Train(const std::string& coordinator, uint64_t first_step, uint64_t end_step,
                   const std::string& checkpoints, int32_t world_size) {
  Weights first(kLayers, std::vector<float>(kElements, 1.0f));
  if (first_step > 0) {
    PRECONDOR_ASSIGN_OR_RETURN(first, Read(PathOf(checkpoints, first_step)));
  }
  ClientOptions options;
  options.coordinator = coordinator;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(options));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(MakeSpec(world_size)).status());
  std::vector<Weights> weights(static_cast<size_t>(world_size), first);
  std::vector<absl::Status> statuses(weights.size());
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < weights.size(); ++rank) {
    ranks.emplace_back(
        [&, rank] { statuses[rank] = TrainRank(*client, rank, first_step, end_step, checkpoints, weights[rank]); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const absl::Status& status : statuses) PRECONDOR_RETURN_IF_ERROR(status);
  return Write(PathOf(checkpoints, end_step), weights[0]);
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  uint64_t first_step = 0, end_step = 0;
  int32_t world_size = 1;
  if (argc < 5 || argc > 6 || !absl::SimpleAtoi(argv[2], &first_step) || !absl::SimpleAtoi(argv[3], &end_step) ||
      (argc == 6 && !absl::SimpleAtoi(argv[5], &world_size))) {
    std::fputs("usage: snapshot_trainer COORDINATOR FIRST_STEP END_STEP CHECKPOINTS [WORLD_SIZE]\n", stderr);
    return 2;
  }
  const absl::Status done = precondor::Train(argv[1], first_step, end_step, argv[4], world_size);
  if (done.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(done.message()).c_str());
  return 1;
}
