// SPDX-License-Identifier: Apache-2.0
// One worker of digits_trainer as a process that can be killed at any instant: another one goes on from its
// checkpoint, bitwise. It can write its history (history/recorder.cc).
//
// Usage: digits_rank RANK SESSION CHECKPOINT FLAGS...     the flags are those of digits_trainer
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/process_setup.h"
#include "kernels/base/status_macros.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::e2e {
namespace {

// Writes the whole file or nothing, whenever the process is killed.
absl::Status WriteCheckpoint(const std::string& path, digits::Trainer& trainer) {
  std::string bytes;
  PutU64(bytes, static_cast<uint64_t>(trainer.step()));
  PutBytes(bytes, trainer.optimizer().SaveState());
  for (const digits::HostMatrix& weight : trainer.model().weights()) {
    PutBytes(bytes, absl::string_view(reinterpret_cast<const char*>(weight.data().data()),
                                      weight.data().size() * sizeof(float)));
  }
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path));
}

// Leaves the trainer at its beginning when there is no file.
absl::Status ReadCheckpoint(const std::string& path, digits::Trainer& trainer) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::OkStatus();
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Decoder in(bytes);
  const auto step = static_cast<int64_t>(in.U64());
  const std::string optimizer(in.Bytes());
  for (digits::HostMatrix& weight : trainer.model().weights()) {
    const absl::string_view data = in.Bytes();
    if (data.size() != weight.data().size() * sizeof(float)) in.Fail();
    if (in.ok()) std::memcpy(weight.data().data(), data.data(), data.size());
  }
  if (!in.done()) return absl::DataLossError(absl::StrCat(path, " is damaged"));
  trainer.GoOnFrom(step);
  return step == 0 ? absl::OkStatus() : trainer.optimizer().LoadState(optimizer);
}

absl::Status TrainRank(const std::vector<std::string>& arguments) {
  uint32_t rank = 0;
  if (arguments.size() < 3 || !absl::SimpleAtoi(arguments[0], &rank))
    return absl::InvalidArgumentError("see the usage");
  const std::string &session = arguments[1], &checkpoint = arguments[2];
  PRECONDOR_ASSIGN_OR_RETURN(digits::Options options,
                             digits::ParseOptions({arguments.begin() + 3, arguments.end()}, PRECONDOR_DIGITS_DATA));
  options.run.session.name = session;
  digits::UseSingleThreadedBlas();
  PRECONDOR_ASSIGN_OR_RETURN(const digits::DigitsData data, digits::LoadDigits(options.data_path));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<digits::Trainer> trainer, digits::Trainer::Make(options.run, data));
  PRECONDOR_RETURN_IF_ERROR(ReadCheckpoint(checkpoint, *trainer));
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                             Client::Connect(ClientOptions{.coordinator = options.coordinator}));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(options.run.session).status());
  PRECONDOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<Worker> worker,
      client->Join(session, {.rank = rank, .first_step = static_cast<uint64_t>(trainer->step())}));
  digits::ServiceExchange exchange(*worker, nullptr);
  while (!trainer->done()) {
    // Before anything of the step is sent: a successor repeats what this process sent of it.
    PRECONDOR_RETURN_IF_ERROR(worker->Flush());
    PRECONDOR_RETURN_IF_ERROR(WriteCheckpoint(checkpoint, *trainer));
    PRECONDOR_RETURN_IF_ERROR(trainer->Step(exchange));
  }
  PRECONDOR_RETURN_IF_ERROR(worker->Flush());
  std::cout << absl::StrFormat("{\"weights_hash\": \"%016x\", \"final_loss\": %.17g, \"steps\": %d}\n",
                               digits::HashWeights(trainer->model().weights()),
                               trainer->model().Evaluate(data.held_out).loss, trainer->step());
  return absl::OkStatus();
}

}  // namespace
}  // namespace precondor::e2e

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  const absl::Status status = precondor::e2e::TrainRank({argv + 1, argv + argc});
  if (status.ok()) return 0;
  std::cerr << "digits_rank: " << status.ToString() << "\n";
  return 1;
}
