// SPDX-License-Identifier: Apache-2.0
// One rank of a session as a process: plane_rank COORDINATOR SESSION RANK INCARNATION FIRST_STEP. For each line that it
// reads it takes a step and prints its number, the checksum of its answers, and "communicator" or "gRPC" as its next
// gradients go.
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"

#include "tests/loopback/plane_steps.h"

namespace precondor {
namespace {

absl::Status Work(const std::vector<std::string>& arguments) {
  uint32_t rank = 0;
  uint64_t incarnation = 0, step = 0;
  if (arguments.size() != 6 || !absl::SimpleAtoi(arguments[3], &rank) ||
      !absl::SimpleAtoi(arguments[4], &incarnation) || !absl::SimpleAtoi(arguments[5], &step)) {
    return absl::InvalidArgumentError("usage: plane_rank COORDINATOR SESSION RANK INCARNATION FIRST_STEP");
  }
  ClientOptions options;
  options.coordinator = arguments[1];
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(options));
  PRECONDOR_ASSIGN_OR_RETURN(
      const std::unique_ptr<Worker> worker,
      client->Join(arguments[2], {.rank = rank, .incarnation = incarnation, .first_step = step}));
  std::cout << "joined" << std::endl;
  for (std::string line; std::getline(std::cin, line); ++step) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<PlaneAnswer> answers, RunPlaneStep(*worker, step));
    std::cout << step << " " << PlaneChecksum(answers) << " "
              << (worker->DataPlaneStatus().ok() ? "communicator" : "gRPC") << std::endl;
  }
  return worker->Flush();
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  const absl::Status status = precondor::Work(std::vector<std::string>(argv, argv + argc));
  if (!status.ok()) std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}
