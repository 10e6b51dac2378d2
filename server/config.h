// SPDX-License-Identifier: Apache-2.0
// What a server process is told: flags over PRECONDOR_* environment over a YAML file over defaults. The table in
// config.cc is the whole list; docs/operations.md describes each option.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor {

enum class ServerRole : uint8_t { kAll, kShard, kCoordinator };

struct ServerConfig {
  ServerRole role = ServerRole::kAll;
  std::string listen = "127.0.0.1:7070";
  std::string port_file;
  std::string advertise;
  std::vector<std::string> shards;
  std::string backend = "cpu";
  int64_t threads = 0;
  int64_t memory_limit_bytes = int64_t{8} << 30;
  int64_t window_steps = 2;
  int64_t statistics_deadline_ms = 0;
  int64_t lease_steps = 64;
  std::string metrics_listen;
  std::string metrics_port_file;
  std::string log_format = "text";
  std::string log_level = "info";
  int64_t drain_deadline_ms = 10000;
  int64_t shard_timeout_ms = 10000;
  int64_t max_message_bytes = int64_t{256} << 20;
  int64_t credit_bytes = int64_t{64} << 20;

  // Where each value came from: "flag --x", "environment PRECONDOR_X", "file F" or "default". By option name.
  std::map<std::string, std::string> origins;
};

absl::string_view ServerRoleName(ServerRole role);  // "all", "shard", "coordinator"

// What the command line asks for beside running.
enum class ConfigAction : uint8_t { kRun, kHelp, kVersion, kCheck, kPrint };

struct ParsedConfig {
  ServerConfig config;
  ConfigAction action = ConfigAction::kRun;
};

// Value of an environment variable, or null; the process' own by default.
using EnvironmentFn = std::function<const char*(const char* name)>;
EnvironmentFn ProcessEnvironment();

// `arguments` without the program's name. InvalidArgument names the source, the option, what was expected and what
// came; an unknown name in any source is an error that offers the nearest known one. NotFound: the file.
absl::StatusOr<ParsedConfig> ParseServerConfig(const std::vector<std::string>& arguments,
                                               const EnvironmentFn& environment);

// The text of --help: every option with its default, and examples.
std::string ServerHelp();

// The configuration as YAML that --config reads back, each line with where its value came from.
std::string PrintServerConfig(const ServerConfig& config);

}  // namespace precondor
