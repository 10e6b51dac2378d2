// SPDX-License-Identifier: Apache-2.0
// Sketches, an optimizer step, and a gradient through the server whose address is the first argument.
#include <cmath>
#include <iostream>
#include <vector>

#include "precondor/client.h"
#include "precondor/optimizer.h"
#include "precondor/statistics.h"

namespace {

constexpr int64_t kOut = 2, kIn = 3;

int Fail(const char* what, const absl::Status& status) {
  std::cerr << what << ": " << status << "\n";
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  precondor::SessionSpec spec;
  spec.name = "consumer";
  spec.sketches = 2;
  spec.layers = {{"fc", kOut, kIn, false}};

  auto client = precondor::Client::Connect({.coordinator = argv[1]});
  if (!client.ok()) return Fail("connect", client.status());
  if (const auto opened = (*client)->OpenSession(spec); !opened.ok()) return Fail("open", opened.status());
  auto worker = (*client)->Join(spec.name, {.rank = 0});
  if (!worker.ok()) return Fail("join", worker.status());

  const std::vector<float> inputs = {1, 2, 3, 4, 5, 6}, output_gradients = {1, -1, 0.5f, 2};
  std::vector<float> a(2 * kIn), g(2 * kOut), gradient = {1, 2, 3, 4, 5, 6}, weight(kOut * kIn, 1.0f);
  precondor::SketchKey key{.step = 0, .layer = 0, .side = precondor::Side::kInput};
  absl::Status status = precondor::ComputeStatistics(spec, key, {inputs.data(), 2, kIn}, 1, {a.data(), 2, kIn});
  key.side = precondor::Side::kOutput;
  status.Update(precondor::ComputeStatistics(spec, key, {output_gradients.data(), 2, kOut}, 2, {g.data(), 2, kOut}));
  status.Update((*worker)->SendStatistics(0, 0, {a.data(), 2, kIn}, {g.data(), 2, kOut}, 2));
  if (!status.ok()) return Fail("statistics", status);

  const precondor::MatrixView view(gradient.data(), kOut, kIn);
  const auto result = (*worker)->Precondition(0, 0, {view, view}, 2).Wait();
  if (!result.ok()) return Fail("precondition", result.status());
  if (result->decision != precondor::Decision::kPreconditioned) return Fail("not preconditioned", absl::OkStatus());
  const auto optimizer = precondor::MakeOptimizer({.name = "sgd"});
  if (!optimizer.ok()) return Fail("optimizer", optimizer.status());
  status = (*optimizer)->Step({{{weight.data(), kOut, kIn}, view, false}}, 0.1);
  if (!status.ok()) return Fail("step", status);

  double norm = 0;
  for (const float value : gradient) norm += static_cast<double>(value) * value;
  // NORM_RESCALE, the default: the gradient's own norm, sqrt(91).
  if (std::abs(std::sqrt(norm) - std::sqrt(91.0)) > 1e-4) return Fail("norm", absl::OkStatus());
  if (std::abs(weight[0] - (1 - 0.1 * gradient[0])) > 1e-6) return Fail("weight", absl::OkStatus());
  std::cout << "ok\n";
  return 0;
}
