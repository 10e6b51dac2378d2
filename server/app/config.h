// SPDX-License-Identifier: Apache-2.0
// The configuration of a server process. Flags override PRECONDOR_* environment variables, these override a YAML file,
// and that overrides the defaults. The table in config_options.cc describes all options, and --help prints it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor {

enum class ServerRole : uint8_t { kAll, kShard, kCoordinator };

struct ServerConfig {
  ServerRole role = ServerRole::kAll;
  std::vector<std::string> listen = {"127.0.0.1:7070"};
  std::string port_file;
  std::string advertise;
  std::vector<std::string> shards;
  std::string backend = "auto";
  int64_t cuda_device = 0;
  std::vector<std::string> cuda_devices;  // device numbers, each once, or only "all"; empty means cuda_device
  int64_t cpu_devices = 1;                // number of devices that the CPU imitates, for tests; no option sets it
  int64_t device_plane_bytes = 0;
  int64_t threads = 0;
  std::string plaintext = "loopback";
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string access_file;
  std::string tls_ca;
  std::string token_file;
  int64_t memory_limit_bytes = int64_t{8} << 30;
  int64_t window_steps = 2;
  int64_t slow_worker_ms = 30000;
  std::string data_dir;
  int64_t snapshot_interval_steps = 1000;
  int64_t gradient_journal_bytes = int64_t{256} << 20;
  int64_t quarantine_days = 30;
  int64_t session_snapshot_steps = 0;
  std::vector<std::string> etcd_endpoints;
  std::string etcd_prefix = "/precondor/coordinator";
  int64_t etcd_lease_ms = 10000;
  int64_t lease_steps = 64;
  int64_t tenant_max_sessions = 0;  // 0 means no limit
  int64_t tenant_max_bytes = 0;     // 0 means no limit
  int64_t tenant_max_calls = 0;     // a second; 0 means no limit
  int64_t reconcile_interval_ms = 1000;
  std::string metrics_listen;
  std::string metrics_port_file;
  std::string log_format = "text";
  std::string log_level = "info";
  std::string trace_endpoint;
  double trace_ratio = 0.01;
  int64_t drain_deadline_ms = 10000;
  int64_t exit_with_pid = 0;  // process id; 0 means none
  int64_t shard_timeout_ms = 10000;
  int64_t max_message_bytes = int64_t{256} << 20;
  int64_t transport_memory = int64_t{512} << 20;  // by default at least twice max_message_bytes
  int64_t credit_bytes = int64_t{64} << 20;

  // Source of each value: "flag --x", "environment PRECONDOR_X", "file F" or "default". By option name.
  std::map<std::string, std::string> origins;
};

// Returns the address that workers connect to, unless the coordinator knows the server by another one: `advertise`, or
// else the first address of `listen`, whose port may still be 0.
std::string DialAddress(const ServerConfig& config);

// Returns the host and port of `trace_endpoint`, or an empty string if it is not an http:// URL of just these two.
std::string TraceCollector(const ServerConfig& config);

// Returns the first address of `listen` that accepts plaintext from other hosts; empty if there is none.
std::string OpenAddress(const ServerConfig& config);

absl::string_view ServerRoleName(ServerRole role);  // "all", "shard", "coordinator"

// What the command line asks for.
enum class ConfigAction : uint8_t { kRun, kHelp, kVersion, kCheck, kPrint };

struct ParsedConfig {
  ServerConfig config;
  ConfigAction action = ConfigAction::kRun;
};

// Environment variables by name.
using Environment = std::map<std::string, std::string>;
Environment ProcessEnvironment();  // variables of this process that begin with PRECONDOR_

// Parses `arguments`, which do not include the program's name. If a flag is repeated, the last one counts; a repeated
// key in the file is an error. Returns InvalidArgument with the source, the option, what was expected and what was
// found. An unknown name is an error, which suggests the nearest known name. In the environment it is an error only if
// it is similar to a known name, because other programs set variables too: Kubernetes sets PRECONDOR_PORT for a service
// "precondor". Returns NotFound if the file cannot be read. Relative paths, also those in the file, are relative to the
// working directory.
absl::StatusOr<ParsedConfig> ParseServerConfig(const std::vector<std::string>& arguments,
                                               const Environment& environment);

// Returns the text of --help: every option by topic, with its default and what it does, and examples.
std::string ServerHelp();

// Returns the configuration as YAML that --config can read. Each line has the source of its value.
std::string PrintServerConfig(const ServerConfig& config);

}  // namespace precondor
