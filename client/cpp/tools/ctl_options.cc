// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_options.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr std::array<absl::string_view, 6> kCommands = {"status", "sessions", "layers", "health", "drain", "help"};

absl::StatusOr<absl::Duration> ParseSeconds(absl::string_view name, absl::string_view text) {
  absl::Duration value;
  if (absl::ParseDuration(text, &value) && value > absl::ZeroDuration()) return value;
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, ": expected a duration such as 10s or 500ms, got \"", text, "\""));
}

absl::Status SetFlag(absl::string_view name, absl::string_view value, CtlOptions& options) {
  if (name == "server") {
    if (value.empty()) return absl::InvalidArgumentError("--server: expected host:port, got nothing");
    options.server = std::string(value);
    return absl::OkStatus();
  }
  if (name == "timeout") {
    PRECONDOR_ASSIGN_OR_RETURN(options.timeout, ParseSeconds(name, value));
    return absl::OkStatus();
  }
  PRECONDOR_ASSIGN_OR_RETURN(options.drain_deadline, ParseSeconds(name, value));
  return absl::OkStatus();
}

bool TakesValue(absl::string_view name) { return name == "server" || name == "timeout" || name == "deadline"; }

absl::Status CheckCommand(const std::vector<std::string>& words, CtlOptions& options) {
  if (words.empty()) return absl::InvalidArgumentError("expected a command: status, sessions, layers, health or drain");
  options.command = words[0];
  if (std::find(kCommands.begin(), kCommands.end(), options.command) == kCommands.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected status, sessions, layers, health or drain, got \"", options.command, "\""));
  }
  const size_t least = options.command == "layers" ? 1 : 0;
  const size_t most = options.command == "layers" || options.command == "health" ? 1 : 0;
  if (words.size() - 1 < least) return absl::InvalidArgumentError("layers: expected the name of a session");
  if (words.size() - 1 > most) {
    return absl::InvalidArgumentError(absl::StrCat(options.command, ": unexpected argument \"", words[1 + most], "\""));
  }
  if (words.size() > 1) options.argument = words[1];
  if (options.drain_deadline > absl::ZeroDuration() && options.command != "drain") {
    return absl::InvalidArgumentError("--deadline: for the command drain only");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments) {
  CtlOptions options;
  std::vector<std::string> words;
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
    if (!TakesValue(name)) return absl::InvalidArgumentError(absl::StrCat("unknown flag ", argument));
    if (equals == absl::string_view::npos && i + 1 == arguments.size()) {
      return absl::InvalidArgumentError(absl::StrCat(argument, ": expected a value"));
    }
    const absl::string_view value =
        equals == absl::string_view::npos ? absl::string_view(arguments[++i]) : argument.substr(equals + 1);
    PRECONDOR_RETURN_IF_ERROR(SetFlag(name, value, options));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckCommand(words, options));
  return options;
}

absl::string_view CtlHelp() {
  return R"(Usage: precondorctl [FLAGS] COMMAND

Commands
  status            version, role, memory and sessions of a server; of a coordinator's shards too
  sessions          sessions that a server knows
  layers SESSION    counters and factor state of a session's layers; through a coordinator, of all its shards
  health [SERVICE]  asks grpc.health.v1; fails unless SERVING
  drain             stops taking new sessions, finishes what is under way, then ends the process

Flags
  --server=HOST:PORT   the server to ask (127.0.0.1:7070)
  --timeout=DURATION   for each answer (10s)
  --deadline=DURATION  drain: time for work in flight; without it, the server's own setting
  --json               one JSON document instead of a table
  --help               this text

Exit code: 0 done, 1 the server did not answer, refused or is not healthy, 2 wrong usage.

Examples
  precondorctl --server=coordinator:7070 status
  precondorctl layers bert --json | jq '.layers[] | select(.rejected > 0)'
  precondorctl --server=shard-3:7070 health && echo ready
  precondorctl --server=shard-3:7070 drain --deadline=30s
)";
}

}  // namespace precondor
