// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/service_layers.h"

#include <memory>
#include <sys/resource.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr int kLayers = 16;
constexpr int64_t kSide = 64;
constexpr double kTargetMilliseconds = 0.4;
constexpr double kTargetMicroseconds = 20;  // of both processes, for a layer

double OwnSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Runs one step, and returns its milliseconds.
absl::StatusOr<double> Step(Worker& worker, uint64_t step, const std::vector<float>& gradient,
                            std::vector<std::vector<float>>& answers) {
  const absl::Time start = MonotonicNow();
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    futures.push_back(worker.Precondition(
        step, static_cast<int64_t>(layer),
        {ConstMatrixView(gradient.data(), kSide, kSide), MatrixView(answers[layer].data(), kSide, kSide)}, 1,
        /*more=*/true));
  }
  // As the Python client does: the last one's answer is usually the last, so that this thread wakes up once.
  for (auto future = futures.rbegin(); future != futures.rend(); ++future) {
    PRECONDOR_RETURN_IF_ERROR(future->Wait().status());
  }
  const double milliseconds = absl::ToDoubleMilliseconds(MonotonicNow() - start);
  PRECONDOR_RETURN_IF_ERROR(worker.ReportStep(step, 1, 1, true, 0.1).Wait().status());
  return milliseconds;
}

}  // namespace

absl::StatusOr<std::vector<PerfRow>> MeasureLayers(const PerfOptions& options, const PerfServer& server) {
  SessionSpec spec;
  spec.name = "perf-step";
  spec.method.name = "identity";
  spec.inv_freq = 1 << 30;
  spec.warmup_steps = 0;
  for (int layer = 0; layer < kLayers; ++layer) spec.layers.push_back({absl::StrCat("l", layer), kSide, kSide, false});
  ClientOptions client_options;
  client_options.coordinator = server.address();
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(client_options));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  const std::vector<float> gradient(kSide * kSide, 0.5F);
  std::vector<std::vector<float>> answers(kLayers, gradient);  // must outlive the worker
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, client->Join(spec.name, {0, 0}));
  uint64_t step = 0;
  std::vector<double> milliseconds;
  double own = 0, servers = 0;
  for (int64_t i = 0; i < options.warmup + options.steps; ++i) {
    if (i == options.warmup) own = OwnSeconds(), servers = server.processor_seconds();
    PRECONDOR_ASSIGN_OR_RETURN(const double took, Step(*worker, step++, gradient, answers));
    if (i >= options.warmup) milliseconds.push_back(took);
  }
  const auto micros = [&](double seconds) { return 1e6 * seconds / static_cast<double>(options.steps * kLayers); };
  own = micros(OwnSeconds() - own);
  servers = micros(server.processor_seconds() - servers);
  worker.reset();
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(spec.name).status());
  PerfRow p50{"layers/step_p50", Percentile(milliseconds, 0.5), "ms"};
  p50.target = kTargetMilliseconds;
  p50.pass = p50.value <= *p50.target;
  PerfRow both{"layers/processor", own + servers, "us"};
  both.target = kTargetMicroseconds;
  both.pass = both.value <= *both.target;
  return std::vector<PerfRow>{p50,
                              {"layers/step_p99", Percentile(milliseconds, 0.99), "ms"},
                              both,
                              {"layers/processor_client", own, "us"},
                              {"layers/processor_server", servers, "us"}};
}

}  // namespace precondor
