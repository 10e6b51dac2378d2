// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_options.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"

namespace precondor {
namespace {

// A command and how many arguments it takes. For all commands but snapshot and session, the first required argument is
// a session's name.
struct CommandWords {
  absl::string_view name;
  size_t least;
  size_t most;
};
constexpr std::array<CommandWords, 10> kCommands = {{{"status", 0, 0},
                                                     {"sessions", 0, 0},
                                                     {"session", 1, 2},
                                                     {"layers", 1, 1},
                                                     {"mode", 1, 2},
                                                     {"snapshot", 1, 2},
                                                     {"health", 0, 1},
                                                     {"drain", 0, 0},
                                                     {"plan", 0, 0},
                                                     {"help", 0, 0}}};
constexpr std::array<absl::string_view, 4> kSnapshotActions = {"create", "list", "verify", "restore"};
constexpr std::array<absl::string_view, 3> kModes = {"second-order", "first-order", "auto"};

std::string CommandNames() {
  return absl::StrJoin(kCommands, ", ",
                       [](std::string* out, const CommandWords& command) { absl::StrAppend(out, command.name); });
}

absl::StatusOr<absl::Duration> ParseSeconds(absl::string_view name, absl::string_view text) {
  absl::Duration value;
  if (absl::ParseDuration(text, &value) && value > absl::ZeroDuration()) return value;
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, ": expected a duration such as 10s or 500ms, got \"", text, "\""));
}

absl::Status SetFlag(absl::string_view name, absl::string_view value, CtlOptions& options) {
  if (name == "server") {
    if (const absl::Status address = CheckServerAddress(value); !address.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--server: ", address.message()));
    }
    options.server = std::string(value);
    return absl::OkStatus();
  }
  for (const auto& [flag, path] :
       {std::pair("tls-ca", &options.security.tls_ca), std::pair("tls-cert", &options.security.tls_cert),
        std::pair("tls-key", &options.security.tls_key), std::pair("token-file", &options.security.token_file)}) {
    if (name != flag) continue;
    *path = std::string(value);
    return absl::OkStatus();
  }
  if (name == "timeout") {
    PRECONDOR_ASSIGN_OR_RETURN(options.timeout, ParseSeconds(name, value));
    return absl::OkStatus();
  }
  if (name == "snapshot-path") {
    if (value.empty()) return absl::InvalidArgumentError("--snapshot-path: expected a directory, got nothing");
    options.snapshot_paths.emplace_back(value);
    return absl::OkStatus();
  }
  if (name == "snapshot") {
    if (absl::SimpleAtoi(value, &options.snapshot) && options.snapshot > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--snapshot: expected the number of a snapshot as snapshot list shows it, got \"", value, "\""));
  }
  if (name == "world-size") {
    if (absl::SimpleAtoi(value, &options.world_size) && options.world_size > 0 && options.world_size <= kMaxWorldSize) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--world-size: expected a number of ranks, 1 ... ", kMaxWorldSize, ", got \"", value, "\""));
  }
  PRECONDOR_ASSIGN_OR_RETURN(options.drain_deadline, ParseSeconds(name, value));
  return absl::OkStatus();
}

bool TakesValue(absl::string_view name) {
  return name == "server" || name == "tls-ca" || name == "tls-cert" || name == "tls-key" || name == "token-file" ||
         name == "timeout" || name == "deadline" || name == "snapshot-path" || name == "snapshot" ||
         name == "world-size" || IsPlanFlag(name);
}

absl::Status CheckDeadline(const CtlOptions& options) {
  if (options.drain_deadline == absl::ZeroDuration() || options.command == "drain") return absl::OkStatus();
  return absl::InvalidArgumentError("--deadline: for the command drain only");
}

absl::Status CheckSnapshot(const CtlOptions& options) {
  if (std::find(kSnapshotActions.begin(), kSnapshotActions.end(), options.action) == kSnapshotActions.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("snapshot: expected ", absl::StrJoin(kSnapshotActions, ", "), ", got \"", options.action, "\""));
  }
  const bool restores = options.action == "restore";
  if ((options.action == "create" || restores) && options.argument.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("snapshot ", options.action, ": expected the name of a session"));
  }
  if (restores && options.snapshot_paths.empty()) {
    return absl::InvalidArgumentError("snapshot restore: expected --snapshot-path, a data directory of each shard");
  }
  return absl::OkStatus();
}

absl::Status CheckSession(const CtlOptions& options) {
  if (options.action != "close") {
    return absl::InvalidArgumentError(absl::StrCat("session: expected close, got \"", options.action, "\""));
  }
  if (!options.argument.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("session close: expected the name of a session");
}

absl::Status CheckRestoreFlags(const CtlOptions& options) {
  const bool restore_flags =
      !options.snapshot_paths.empty() || options.snapshot != 0 || options.replace || options.world_size != 0;
  if (!restore_flags || options.action == "restore") return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--snapshot-path, --snapshot, --world-size and --replace: for the command snapshot restore only");
}

absl::Status CheckSecurity(const ClientSecurity& files) {
  if (files.tls_cert.empty() != files.tls_key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(files.tls_cert.empty() ? "--tls-key" : "--tls-cert", ": expected ",
                                                   files.tls_cert.empty() ? "--tls-cert" : "--tls-key",
                                                   " beside it, got none"));
  }
  if (!files.tls_ca.empty() || (files.tls_cert.empty() && files.token_file.empty())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(files.token_file.empty() ? "--tls-cert" : "--token-file",
                                                 ": expected --tls-ca beside it, got none"));
}

absl::Status CheckPlan(const PlanFlags& flags, CtlOptions& options) {
  if (options.command == "plan") {
    PRECONDOR_ASSIGN_OR_RETURN(options.plan, ParsePlanOptions(flags));
    return absl::OkStatus();
  }
  if (flags.empty()) return absl::OkStatus();
  const std::string& flag = flags.begin()->first;
  return absl::InvalidArgumentError(absl::StrCat("--", flag.substr(0, flag.find('.')), ": for the command plan only"));
}

absl::Status CheckCommand(const std::vector<std::string>& words, CtlOptions& options) {
  if (words.empty()) return absl::InvalidArgumentError(absl::StrCat("expected a command: ", CommandNames()));
  options.command = words[0];
  const auto command = std::find_if(kCommands.begin(), kCommands.end(),
                                    [&](const CommandWords& known) { return known.name == options.command; });
  if (command == kCommands.end()) {
    return absl::InvalidArgumentError(absl::StrCat("expected ", CommandNames(), ", got \"", options.command, "\""));
  }
  const size_t arguments = words.size() - 1;
  if (arguments < command->least && options.command == "snapshot") return CheckSnapshot(options);
  if (arguments < command->least && options.command == "session") return CheckSession(options);
  if (arguments < command->least) {
    return absl::InvalidArgumentError(absl::StrCat(options.command, ": expected the name of a session"));
  }
  if (arguments > command->most) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.command, ": unexpected argument \"", words[1 + command->most], "\""));
  }
  if (options.command == "snapshot" || options.command == "session") {
    options.action = words[1];
    if (arguments > 1) options.argument = words[2];
    PRECONDOR_RETURN_IF_ERROR(options.command == "session" ? CheckSession(options) : CheckSnapshot(options));
    return CheckDeadline(options);
  }
  if (arguments > 0) options.argument = words[1];
  if (arguments > 1) options.mode = words[2];
  if (options.command == "mode" && arguments > 1 &&
      std::find(kModes.begin(), kModes.end(), options.mode) == kModes.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("mode: expected ", absl::StrJoin(kModes, ", "), ", got \"", options.mode, "\""));
  }
  return CheckDeadline(options);
}

}  // namespace

absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments) {
  CtlOptions options;
  std::vector<std::string> words;
  PlanFlags plan_flags;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "-h" || argument == "--help") {
      options.command = "help";
      return options;
    }
    if (!absl::StartsWith(argument, "--")) {
      words.push_back(arguments[i]);
      continue;
    }
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(2, equals == absl::string_view::npos ? equals : equals - 2);
    if (name == "json" && equals == absl::string_view::npos) {
      options.json = true;
      continue;
    }
    if (name == "replace" && equals == absl::string_view::npos) {
      options.replace = true;
      continue;
    }
    if (!TakesValue(name)) return absl::InvalidArgumentError(absl::StrCat("unknown flag ", argument));
    if (equals == absl::string_view::npos && i + 1 == arguments.size()) {
      return absl::InvalidArgumentError(absl::StrCat(argument, ": expected a value"));
    }
    const absl::string_view value =
        equals == absl::string_view::npos ? absl::string_view(arguments[++i]) : argument.substr(equals + 1);
    PRECONDOR_RETURN_IF_ERROR(IsPlanFlag(name) ? AddPlanFlag(name, value, plan_flags) : SetFlag(name, value, options));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckCommand(words, options));
  PRECONDOR_RETURN_IF_ERROR(CheckRestoreFlags(options));
  PRECONDOR_RETURN_IF_ERROR(CheckSecurity(options.security));
  PRECONDOR_RETURN_IF_ERROR(CheckPlan(plan_flags, options));
  return options;
}

absl::string_view CtlHelp() {
  return R"(precondorctl: asks and steers running servers.

Usage: precondorctl [FLAGS] COMMAND

Commands
  status
      The command shows version, role, memory and sessions of a server, and of a coordinator's shards.
  sessions
      The command lists the sessions of a server.
  session close SESSION
      The coordinator ends a session. Its factors are deleted, and its workers fail.
  layers SESSION
      The command shows counters and factor state of each layer. A coordinator asks all its shards.
  mode SESSION [second-order|first-order|auto]
      The command shows the mode of the steps and its reason, or sets it. auto returns the choice to the policy.
  snapshot create SESSION
      All shards write a snapshot at one step, which the coordinator chooses shortly ahead of the job.
  snapshot list [SESSION]
      The command lists the snapshots of whole sessions and those of each shard.
  snapshot verify [SESSION]
      The command lists the snapshots after a shard has read every byte of them.
  snapshot restore SESSION
      The coordinator opens a session with the factors of a snapshot, on its present shards. The job then begins
      with the step of the snapshot.
  health [SERVICE]
      The command asks grpc.health.v1. It fails unless the answer is SERVING.
  drain
      The server takes no new sessions, finishes the work in flight, and ends.
  plan
      The command computes memory, bytes and seconds a step of a session, and the number of shards that it needs.

Connection
  --server=ADDRESS  default 127.0.0.1:7070
      The command asks the server at host:port or unix:/path/to/socket.
  --tls-ca=FILE  default none
      The server's certificate needs the signature of an authority in this file. Without it, the connection is plaintext.
  --tls-cert=FILE  default none
      The command shows this certificate to a server that asks for one.
  --tls-key=FILE  default none
      This file has the private key of --tls-cert.
  --token-file=FILE  default none
      Every call carries the bearer token in this file. The flag needs --tls-ca.
  --timeout=DURATION  default 10 s
      A call fails after this time, such as 500ms or 10s.

Commands' own flags
  --deadline=DURATION  default the server's --drain-deadline-ms
      A drain waits this long for work in flight.
  --snapshot-path=DIR  default none
      A restore reads this data directory of a shard, or a copy of it. Give the flag once for each shard.
  --snapshot=ID  default the newest
      A restore reads the snapshot with this number, which snapshot list shows.
  --world-size=N  default that of the snapshot
      The restored job has this many ranks.
  --replace
      A restore first closes a session of this name. The factors of that session are deleted.

Output
  --json
      The command prints one JSON document, and no table.
  --help
      The command prints this text.

Exit status: 0 done; 1 no answer, a refusal or an unhealthy server; 2 wrong usage.

Examples
  precondorctl --server=coordinator:7070 status
  precondorctl layers bert --json | jq '.layers[] | select(.rejected > 0)'
  precondorctl --server=coordinator:7070 mode bert first-order
  precondorctl --server=shard-3:7070 health && echo ready
  precondorctl --server=shard-3:7070 drain --deadline=30s
  precondorctl snapshot restore bert --snapshot-path=/backup/shard-0 --snapshot-path=/backup/shard-1
)";
}

}  // namespace precondor
