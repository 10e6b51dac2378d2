// SPDX-License-Identifier: Apache-2.0
// The command line of precondorctl, and what its commands do. No terminal I/O.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/tools/plan_command.h"
#include "kernels/base/client_security.h"

namespace precondor {

struct CtlOutput {
  std::string text;  // for standard output
  // False if the answer reports a problem: a service that is not serving, a shard that does not answer, a damaged
  // snapshot, a plan that does not fit.
  bool ok = true;
};

struct CtlCommand;

struct CtlOptions {
  const CtlCommand* command = nullptr;
  std::string argument;  // the session; health: the service; empty if there is none
  // mode: "second-order", "first-order" or "auto"; empty shows the current mode
  std::string mode;
  std::string server = "127.0.0.1:7070";
  ClientSecurity security;
  absl::Duration timeout = absl::Seconds(10);
  absl::Duration drain_deadline = absl::ZeroDuration();  // 0 means the server's default
  std::vector<std::string> snapshot_paths;               // snapshot restore: data directories of shards
  uint64_t snapshot = 0;                                 // snapshot restore: number of the snapshot; 0 means the newest
  bool replace = false;                                  // snapshot restore: first close a session of this name
  int64_t world_size = 0;                                // snapshot restore: new number of ranks; 0 keeps the old one
  PlanOptions plan;
  bool json = false;
};

// A command: its words on the command line, its arguments, and what --help says.
struct CtlCommand {
  absl::string_view name;
  absl::string_view action;     // the second word, or ""
  absl::string_view arguments;  // words; those that begin with [ may be absent
  absl::string_view help;
  absl::StatusOr<CtlOutput> (*run)(const CtlOptions& options);
};
// All commands.
absl::Span<const CtlCommand> CtlCommands();

// Parses the arguments after the program's name. Flags may stand anywhere, as --name=value or --name value. Returns
// InvalidArgument, which names the wrong argument and the problem.
absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments);

std::string CtlHelp();

// Runs `options.command`. Returns the server's error, or Unavailable with the server's address.
absl::StatusOr<CtlOutput> RunCtlCommand(const CtlOptions& options);

// Reads and checks everything that it will send before it sends the first request. Returns DataLoss with the name of a
// damaged file, another error of FindStoredSession, or a server's error.
absl::StatusOr<CtlOutput> RunRestore(const CtlOptions& options);

}  // namespace precondor
