// SPDX-License-Identifier: Apache-2.0
// The C++ client's half of interop_test.py: runs the session described there and prints every answer of rank 0, so
// that the Python client's can be compared bit by bit.
//   cpp_client_answer COORDINATOR SESSION OUTPUT
// Prints "step layer decision factor_version" a line, in order; OUTPUT gets the answers' f32 elements in that order.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr int kWorldSize = 2;
constexpr int kSteps = 2;
constexpr uint64_t kSamples[kWorldSize] = {3, 5};

// The same numbers as interop_test.py's `pattern`: multiples of 2^-10 in [-1, 1), exact in every element type used.
std::vector<float> Pattern(int64_t count, uint64_t salt) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>((static_cast<uint64_t>(i) * 7919 + salt * 104729) % 2048) / 1024.0f - 1.0f;
  }
  return values;
}

uint64_t Salt(uint64_t step, uint64_t layer, uint64_t rank, uint64_t tensor) {
  return ((step * 10 + layer) * 10 + rank) * 10 + tensor;
}

SessionSpec Spec(const std::string& name) {
  SessionSpec spec;
  spec.name = name;
  spec.seed = 7;
  spec.world_size = kWorldSize;
  spec.exchange = ExchangeMode::kDirect;
  spec.statistics = StatisticsKind::kSigned;
  spec.sketches = 2;
  spec.statistics_dtype = DType::kF16;
  spec.gradient_dtype = DType::kF32;
  spec.method.name = "mkor";
  spec.method.options = {{"rank", 8.0}};
  spec.layers = {{"small", 5, 7, false}, {"large", 300, 1001, true}};
  return spec;
}

// One layer's step of one rank; the gradient's memory also takes the answer.
struct Sent {
  std::vector<float> gradient;
  PreconditionFuture answer;
};

absl::StatusOr<Sent> Send(Worker& worker, int step, int layer) {
  const int rank = static_cast<int>(worker.session().rank);
  const LayerSpec& shape = worker.session().spec.layers[layer];
  const int64_t q = VectorsPerWorker(worker.session().spec, 0);
  const std::vector<float> a = Pattern(q * shape.d_in, Salt(step, layer, rank, 0));
  const std::vector<float> g = Pattern(q * shape.d_out, Salt(step, layer, rank, 1));
  PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, layer, ConstMatrixView(a.data(), q, shape.d_in),
                                                  ConstMatrixView(g.data(), q, shape.d_out), kSamples[rank]));
  Sent sent{Pattern(shape.d_out * shape.d_in, Salt(step, layer, rank, 2)), {}};
  const MatrixView matrix(sent.gradient.data(), shape.d_out, shape.d_in);
  sent.answer = worker.Precondition(step, layer, {matrix, matrix}, kSamples[rank]);
  return sent;
}

absl::Status RunStep(std::vector<std::unique_ptr<Worker>>& workers, int step, std::ofstream& out) {
  const int layers = static_cast<int>(workers[0]->session().spec.layers.size());
  std::vector<Sent> sent;
  for (const std::unique_ptr<Worker>& worker : workers) {
    for (int layer = 0; layer < layers; ++layer) {
      PRECONDOR_ASSIGN_OR_RETURN(Sent one, Send(*worker, step, layer));
      sent.push_back(std::move(one));
    }
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const Preconditioned answer, sent[i].answer.Wait());
    if (i >= static_cast<size_t>(layers)) continue;  // rank 1's
    std::cout << step << " " << i << " " << DecisionName(answer.decision) << " " << answer.factor_version << "\n";
    out.write(reinterpret_cast<const char*>(sent[i].gradient.data()),
              static_cast<std::streamsize>(sent[i].gradient.size() * sizeof(float)));
  }
  for (const std::unique_ptr<Worker>& worker : workers) {
    PRECONDOR_RETURN_IF_ERROR(
        worker->ReportStep(step, 1.0, kSamples[worker->session().rank], true, 0.0).Wait().status());
  }
  return absl::OkStatus();
}

absl::Status Run(const std::string& coordinator, const std::string& session, const std::string& output) {
  ClientOptions options;
  options.coordinator = coordinator;
  std::vector<std::unique_ptr<Client>> clients;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Client::Connect(options));
    PRECONDOR_RETURN_IF_ERROR(client->OpenSession(Spec(session)).status());
    clients.push_back(std::move(client));
  }
  // Join waits for all ranks: one of them waits on a thread of its own.
  absl::StatusOr<std::unique_ptr<Worker>> second = absl::UnknownError("not joined");
  std::thread joiner([&] { second = clients[1]->Join(session, WorkerOptions{.rank = 1, .incarnation = 2}); });
  absl::StatusOr<std::unique_ptr<Worker>> first = clients[0]->Join(session, WorkerOptions{.rank = 0, .incarnation = 1});
  joiner.join();
  PRECONDOR_RETURN_IF_ERROR(first.status());
  PRECONDOR_RETURN_IF_ERROR(second.status());
  std::vector<std::unique_ptr<Worker>> workers;
  workers.push_back(*std::move(first));
  workers.push_back(*std::move(second));
  std::ofstream out(output, std::ios::binary);
  for (int step = 0; step < kSteps; ++step) PRECONDOR_RETURN_IF_ERROR(RunStep(workers, step, out));
  out.close();
  if (!out) return absl::DataLossError(absl::StrCat("cannot write ", output));
  workers.clear();
  return clients[0]->CloseSession(session).status();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: cpp_client_answer COORDINATOR SESSION OUTPUT\n";
    return 2;
  }
  const absl::Status status = precondor::Run(argv[1], argv[2], argv[3]);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
