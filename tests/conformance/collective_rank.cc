// SPDX-License-Identifier: Apache-2.0
// One rank of a local communicator as a process: collective_rank ID RANK SIZE TIMEOUT_MS work|repeat.
//   work    does one of everything and prints the results' checksums, then the status.
//   repeat  says "running" after its first operation, goes on until one fails, and prints that status twice: of the
//           operation that failed and of the next.
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/time.h"

#include "kernels/cpu/local_collective.h"
#include "tests/conformance/collective_rank_work.h"

namespace precondor {
namespace {

absl::Status Repeat(Collective& ranks, absl::Duration timeout) {
  std::vector<float> values(1 << 20, 1.0f);  // more than sockets hold, so that a rank is most of the time inside
  const auto once = [&] {
    return ranks.AllReduce(DType::kF32, values.data(), values.data(), static_cast<int64_t>(values.size()), timeout);
  };
  absl::Status status = once();
  std::cout << "running" << std::endl;
  while (status.ok()) status = once();
  std::cout << status << std::endl;
  return once();
}

int Main(const std::vector<std::string>& arguments) {
  int rank = 0, size = 0;
  int64_t timeout_ms = 0;
  if (arguments.size() != 6 || !absl::SimpleAtoi(arguments[2], &rank) || !absl::SimpleAtoi(arguments[3], &size) ||
      !absl::SimpleAtoi(arguments[4], &timeout_ms)) {
    std::cerr << "usage: collective_rank ID RANK SIZE TIMEOUT_MS work|repeat\n";
    return 2;
  }
  const absl::Duration timeout = absl::Milliseconds(timeout_ms);
  const absl::StatusOr<std::unique_ptr<Collective>> ranks = MakeLocalCollective(arguments[1], rank, size, timeout);
  if (!ranks.ok()) {
    std::cout << ranks.status() << std::endl;
    return 1;
  }
  const absl::Status status = arguments[5] == "work" ? RankWork(**ranks, timeout, std::cout) : Repeat(**ranks, timeout);
  std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::Main(std::vector<std::string>(argv, argv + argc)); }
