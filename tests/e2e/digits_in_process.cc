// SPDX-License-Identifier: Apache-2.0
// precondor-digits without a service: takes its flags and writes its JSON, in which no bytes travel. For the search of
// learning rates (tests/bench/digits.py), which needs hundreds of runs.
#include <fstream>
#include <iostream>

#include "client/cpp/examples/options.h"
#include "client/cpp/examples/results.h"
#include "kernels/base/blas_core.h"
#include "kernels/base/status_macros.h"
#include "tests/e2e/in_process.h"

namespace precondor::e2e {
namespace {

absl::Status Run(int argc, const char* const* argv) {
  PRECONDOR_ASSIGN_OR_RETURN(
      const digits::Options options,
      digits::ParseOptions(absl::MakeConstSpan(argv + 1, static_cast<size_t>(argc - 1)), PRECONDOR_DIGITS_DATA));
  digits::UseSingleThreadedBlas();
  PRECONDOR_ASSIGN_OR_RETURN(const digits::DigitsData data, digits::LoadDigits(options.data_path));
  std::vector<digits::RankResult> result(1);
  PRECONDOR_ASSIGN_OR_RETURN(result[0].trained, TrainInProcess(options.run, SessionSpec().statistics_dtype, data, {}));
  std::ofstream(options.json_path) << digits::ResultJson(options.run, result);
  return absl::OkStatus();
}

}  // namespace
}  // namespace precondor::e2e

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  const absl::Status status = precondor::e2e::Run(argc, argv);
  if (status.ok()) return 0;
  std::cerr << "digits_in_process: " << status.ToString() << "\n";
  return 1;
}
