// SPDX-License-Identifier: Apache-2.0
// The command line of precondorctl.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "client/cpp/tools/plan_options.h"
#include "kernels/base/client_security.h"

namespace precondor {

struct CtlOptions {
  // "status", "sessions", "session", "layers", "mode", "snapshot", "health", "drain", "plan", "help"
  std::string command;
  std::string argument;  // session, layers, mode, snapshot: the session; health: the service, may be empty
  std::string mode;      // mode: "second-order", "first-order", "auto"; empty: show
  // snapshot: "create", "list", "verify", "restore"; session: "quarantined", "adopt", "delete-quarantined"
  std::string action;
  std::string server = "127.0.0.1:7070";
  ClientSecurity security;
  absl::Duration timeout = absl::Seconds(10);
  absl::Duration drain_deadline = absl::ZeroDuration();  // 0: the server's own
  std::vector<std::string> snapshot_paths;               // snapshot restore: data directories of shards
  uint64_t snapshot = 0;                                 // the same: number of the session's snapshot; 0: the newest
  bool replace = false;                                  // the same: close a session of that name first
  int64_t world_size = 0;                                // the same: ranks of the job from now on; 0: as many as before
  uint64_t session_id = 0;  // session adopt and delete-quarantined: which of that name; 0: the only one
  PlanOptions plan;
  bool json = false;
};

// `arguments` are those after the program's name; flags may stand anywhere, as --name=value or --name value.
// InvalidArgument says what is wrong with which argument.
absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments);

absl::string_view CtlHelp();

}  // namespace precondor
