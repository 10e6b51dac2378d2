// SPDX-License-Identifier: Apache-2.0
// digits_trainer without a service: takes its flags and prints the held-out loss at the end. For the search of
// learning rates (tests/bench/digits.py), which needs hundreds of runs.
#include <iostream>

#include "absl/strings/str_format.h"

#include "kernels/base/process_setup.h"
#include "kernels/base/status_macros.h"
#include "tests/e2e/in_process.h"
#include "tests/e2e/trainer/options.h"

namespace precondor::e2e {
namespace {

absl::StatusOr<double> FinalLoss(const std::vector<std::string>& arguments) {
  PRECONDOR_ASSIGN_OR_RETURN(const digits::Options options, digits::ParseOptions(arguments, PRECONDOR_DIGITS_DATA));
  digits::UseSingleThreadedBlas();
  PRECONDOR_ASSIGN_OR_RETURN(const digits::DigitsData data, digits::LoadDigits(options.data_path));
  PRECONDOR_ASSIGN_OR_RETURN(digits::Mlp model, TrainInProcess(options.run, data));
  return model.Evaluate(data.held_out).loss;
}

}  // namespace
}  // namespace precondor::e2e

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  const absl::StatusOr<double> loss = precondor::e2e::FinalLoss({argv + 1, argv + argc});
  if (loss.ok()) {
    std::cout << absl::StrFormat("%.17g\n", *loss);
    return 0;
  }
  std::cerr << "digits_in_process: " << loss.status().ToString() << "\n";
  return 1;
}
