// SPDX-License-Identifier: Apache-2.0
// The command line of precondorctl.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor {

struct CtlOptions {
  std::string command;   // "status", "sessions", "layers", "mode", "snapshot", "health", "drain", "help"
  std::string argument;  // layers, mode, snapshot: the session; health: the service, may be empty
  std::string mode;      // mode: "second-order", "first-order", "auto"; empty: show
  std::string action;    // snapshot: "create", "list", "verify"
  std::string server = "127.0.0.1:7070";
  absl::Duration timeout = absl::Seconds(10);
  absl::Duration drain_deadline = absl::ZeroDuration();  // 0: the server's own
  bool json = false;
};

// `arguments` are those after the program's name; flags may stand anywhere, as --name=value or --name value.
// InvalidArgument says what is wrong with which argument.
absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments);

absl::string_view CtlHelp();

}  // namespace precondor
