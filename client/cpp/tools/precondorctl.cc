// SPDX-License-Identifier: Apache-2.0
// precondorctl: sends a command to a server and prints the answer.
#include <iostream>
#include <string>
#include <vector>

#include "client/cpp/tools/ctl_commands.h"
#include "client/cpp/tools/ctl_options.h"

int main(int argc, char** argv) {
  const absl::StatusOr<precondor::CtlOptions> options =
      precondor::ParseCtlOptions(std::vector<std::string>(argv + 1, argv + argc));
  if (!options.ok()) {
    std::cerr << "precondorctl: " << options.status().message() << "\nTry precondorctl --help.\n";
    return 2;
  }
  const absl::StatusOr<precondor::CtlOutput> output = precondor::RunCtlCommand(*options);
  if (!output.ok()) {
    std::cerr << "precondorctl: " << output.status().message() << "\n";
    return 1;
  }
  std::cout << output->text;
  return output->ok ? 0 : 1;
}
