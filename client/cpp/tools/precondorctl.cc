// SPDX-License-Identifier: Apache-2.0
// precondorctl: sends a command to a server and prints the answer.
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "client/cpp/tools/ctl_commands.h"
#include "kernels/base/printable.h"

namespace {

// Names and errors come from servers and other clients: a terminal must not obey them.
std::string Lines(absl::string_view text) {
  return absl::StrJoin(absl::StrSplit(text, '\n'), "\n", [](std::string* out, absl::string_view line) {
    absl::StrAppend(out, precondor::Printable(line));
  });
}

}  // namespace

int main(int argc, char** argv) {
  const absl::StatusOr<precondor::CtlOptions> options =
      precondor::ParseCtlOptions(std::vector<std::string>(argv + 1, argv + argc));
  if (!options.ok()) {
    std::cerr << "precondorctl: " << Lines(options.status().message()) << "\nTry precondorctl --help.\n";
    return 2;
  }
  const absl::StatusOr<precondor::CtlOutput> output = precondor::RunCtlCommand(*options);
  if (!output.ok()) {
    std::cerr << "precondorctl: " << Lines(output.status().message()) << "\n";
    return 1;
  }
  std::cout << Lines(output->text);
  return output->ok ? 0 : 1;
}
