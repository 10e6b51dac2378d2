// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_options.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"

namespace precondor {
namespace {

constexpr std::array<absl::string_view, 3> kModes = {"second-order", "first-order", "auto"};

// Returns the commands' first words, or the second words of the commands with the first word `name`.
std::string Expected(absl::string_view name = "") {
  std::vector<absl::string_view> words;
  for (const CtlCommand& command : CtlCommands()) {
    const absl::string_view word = name.empty() ? command.name : command.action;
    if ((name.empty() || command.name == name) && (words.empty() || words.back() != word)) words.push_back(word);
  }
  return absl::StrJoin(words, ", ");
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

// Refuses flags of another command.
absl::Status CheckFlags(const CtlOptions& options) {
  if (options.drain_deadline != absl::ZeroDuration() && options.command->name != "drain") {
    return absl::InvalidArgumentError("--deadline: for the command drain only");
  }
  const bool restore_flags =
      !options.snapshot_paths.empty() || options.snapshot != 0 || options.replace || options.world_size != 0;
  if (options.command->action != "restore") {
    return restore_flags ? absl::InvalidArgumentError(
                               "--snapshot-path, --snapshot, --world-size and --replace: for the "
                               "command snapshot restore only")
                         : absl::OkStatus();
  }
  if (!options.snapshot_paths.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("snapshot restore: expected --snapshot-path, a data directory of each shard");
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
  if (options.command->name == "plan") {
    PRECONDOR_ASSIGN_OR_RETURN(options.plan, ParsePlanOptions(flags));
    return absl::OkStatus();
  }
  if (flags.empty()) return absl::OkStatus();
  const std::string& flag = flags.begin()->first;
  return absl::InvalidArgumentError(absl::StrCat("--", flag.substr(0, flag.find('.')), ": for the command plan only"));
}

absl::StatusOr<const CtlCommand*> FindCommand(const std::vector<std::string>& words) {
  if (words.empty()) return absl::InvalidArgumentError(absl::StrCat("expected a command: ", Expected()));
  const std::string action = words.size() > 1 ? words[1] : "";
  bool known = false;
  for (const CtlCommand& command : CtlCommands()) {
    if (command.name != words[0]) continue;
    if (command.action.empty() || command.action == action) return &command;
    known = true;
  }
  return absl::InvalidArgumentError(
      known ? absl::StrCat(words[0], ": expected ", Expected(words[0]), ", got \"", action, "\"")
            : absl::StrCat("expected ", Expected(), ", got \"", words[0], "\""));
}

absl::Status CheckCommand(const std::vector<std::string>& words, CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(options.command, FindCommand(words));
  const CtlCommand& command = *options.command;
  const size_t own = command.action.empty() ? 1 : 2;
  const std::vector<absl::string_view> expected = absl::StrSplit(command.arguments, ' ', absl::SkipEmpty());
  if (words.size() == own && !expected.empty() && expected[0][0] != '[') {
    return absl::InvalidArgumentError(absl::StrCat(command.name, command.action.empty() ? "" : " ", command.action,
                                                   ": expected the name of a session"));
  }
  if (words.size() > own + expected.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(command.name, ": unexpected argument \"", words[own + expected.size()], "\""));
  }
  if (words.size() > own) options.argument = words[own];
  if (words.size() <= own + 1) return absl::OkStatus();
  options.mode = words[own + 1];
  if (std::find(kModes.begin(), kModes.end(), options.mode) != kModes.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mode: expected ", absl::StrJoin(kModes, ", "), ", got \"", options.mode, "\""));
}

}  // namespace

absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments) {
  CtlOptions options;
  std::vector<std::string> words;
  PlanFlags plan_flags;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const absl::string_view argument = arguments[i];
    if (argument == "-h" || argument == "--help") {
      PRECONDOR_RETURN_IF_ERROR(CheckCommand({"help"}, options));
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
  PRECONDOR_RETURN_IF_ERROR(CheckFlags(options));
  PRECONDOR_RETURN_IF_ERROR(CheckSecurity(options.security));
  PRECONDOR_RETURN_IF_ERROR(CheckPlan(plan_flags, options));
  return options;
}

std::string CtlHelp() {
  std::string commands;
  for (const CtlCommand& command : CtlCommands()) {
    absl::StrAppend(&commands, "  ", command.name, command.action.empty() ? "" : " ", command.action,
                    command.arguments.empty() ? "" : " ", command.arguments, "\n      ", command.help, "\n");
  }
  return absl::StrCat(
      "precondorctl: asks and steers running servers.\n\nUsage: precondorctl [FLAGS] COMMAND\n\nCommands\n", commands,
      R"(
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
)");
}

}  // namespace precondor
