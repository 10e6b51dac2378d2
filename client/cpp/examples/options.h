// SPDX-License-Identifier: Apache-2.0
// The command line of precondor-digits.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "client/cpp/examples/run.h"

namespace precondor::digits {

struct Options {
  bool help = false;
  Run run;
  int64_t steps = 0;        // 0: the task's own; ParseOptions has put them into `run`
  std::string coordinator;  // host:port
  std::string session;      // empty: a name of this process
  int32_t rank = -1;        // the one worker of this process; -1: all workers, a thread each
  std::string checkpoint_path;
  std::string data_path;
  std::string json_path;
};

// Flags are --name=value or --name value. InvalidArgument names the flag, what was expected and what came.
absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments, absl::string_view default_data_path);

// Adds "name=value" to the options of `method`: true and false are flags, numbers are numbers, the
// rest is text, without quotes around it.
absl::Status AddMethodOption(absl::string_view text, MethodConfig& method);

// What --help prints.
std::string HelpText();

}  // namespace precondor::digits
