// SPDX-License-Identifier: Apache-2.0
// A whole client: one worker trains one linear layer, y = W x, through the server whose address is the first argument.
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "precondor/client.h"
#include "precondor/statistics.h"

namespace {

constexpr int64_t kRows = 4, kOut = 2, kIn = 3;
constexpr uint64_t kSteps = 51;
constexpr double kLearningRate = 0.1;

absl::Status Train(const std::string& address) {
  precondor::SessionSpec spec;  // one worker, method mkor, signed sketches: the defaults
  spec.name = "minimal";
  spec.layers = {{"fc", kOut, kIn}};
  auto client = precondor::Client::Connect({.coordinator = address});
  if (!client.ok()) return client.status();
  if (auto opened = (*client)->OpenSession(spec); !opened.ok()) return opened.status();
  auto joined = (*client)->Join(spec.name, {.rank = 0});
  if (!joined.ok()) return joined.status();
  precondor::Worker& worker = **joined;

  std::vector<float> x = {1, 0, 2, 0, 1, -1, 2, 1, 0, -1, 2, 1}, target = {3, -1, 1, 1, 4, -1, 4, 3};
  std::vector<float> weight(kOut * kIn), error(kRows * kOut), gradient(kOut * kIn);
  const int64_t vectors = precondor::VectorsPerWorker(spec, 0);
  std::vector<float> a(vectors * kIn), g(vectors * kOut);
  for (uint64_t step = 0; step < kSteps; ++step) {
    double loss = 0;  // a mean over the rows
    gradient.assign(gradient.size(), 0);
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t o = 0; o < kOut; ++o) {
        float e = -target[row * kOut + o];
        for (int64_t i = 0; i < kIn; ++i) e += weight[o * kIn + i] * x[row * kIn + i];
        loss += 0.5 * e * e / kRows;
        error[row * kOut + o] = e / kRows;  // the gradient of the loss by the layer's output
        for (int64_t i = 0; i < kIn; ++i) gradient[o * kIn + i] += e / kRows * x[row * kIn + i];
      }
    }
    if (worker.NeedsStatistics(step, 0)) {
      precondor::SketchKey key{.seed = spec.seed, .step = step};
      absl::Status sent = precondor::ComputeStatistics(spec, key, {x.data(), kRows, kIn}, 1, {a.data(), vectors, kIn});
      key.side = precondor::Side::kOutput;
      sent.Update(
          precondor::ComputeStatistics(spec, key, {error.data(), kRows, kOut}, kRows, {g.data(), vectors, kOut}));
      sent.Update(worker.SendStatistics(step, 0, {a.data(), vectors, kIn}, {g.data(), vectors, kOut}, kRows));
      if (!sent.ok()) return sent;
    }
    const precondor::MatrixView view(gradient.data(), kOut, kIn);  // the answer replaces the gradient
    if (auto answer = worker.Precondition(step, 0, {view, view}, kRows).Wait(); !answer.ok()) return answer.status();
    for (size_t i = 0; i < weight.size(); ++i) weight[i] -= kLearningRate * gradient[i];
    if (step % 10 == 0) std::cout << "step " << step << ": loss " << loss << "\n";
    if (auto next = worker.ReportStep(step, loss, kRows, true, kLearningRate).Wait(); !next.ok()) return next.status();
  }
  return worker.Flush();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Train(argc > 1 ? argv[1] : "127.0.0.1:7070");
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
