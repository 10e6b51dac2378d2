// SPDX-License-Identifier: Apache-2.0
// What a server process is told: flags over PRECONDOR_* environment over a YAML file over defaults. The table in
// config.cc is the whole list; docs/operations.md describes each option.
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
  std::vector<std::string> cuda_devices;  // numbers, each once, or "all" alone; empty: cuda_device
  int64_t cpu_devices = 1;  // devices that the CPU acts as, to test shards with several; no option sets it
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
  int64_t statistics_deadline_ms = 0;
  double quorum = 1.0;
  int64_t slow_worker_ms = 30000;
  int64_t plane_timeout_ms = 60000;
  std::string plane_transport = "local";
  int64_t plane_device = 0;
  std::string data_dir;
  int64_t snapshot_interval_steps = 1000;
  int64_t quarantine_days = 30;
  int64_t session_snapshot_steps = 0;
  std::vector<std::string> etcd_endpoints;
  std::string etcd_prefix = "/precondor/coordinator";
  int64_t etcd_lease_ms = 10000;
  int64_t lease_steps = 64;
  int64_t tenant_max_sessions = 0;  // 0: no limit
  int64_t tenant_max_bytes = 0;     // likewise
  int64_t reconcile_interval_ms = 1000;
  int64_t shard_loss_ms = 10000;
  std::string metrics_listen;
  std::string metrics_port_file;
  std::string log_format = "text";
  std::string log_level = "info";
  std::string trace_endpoint;
  double trace_ratio = 0.01;
  int64_t drain_deadline_ms = 10000;
  int64_t exit_with_pid = 0;  // 0: with no other process
  int64_t shard_timeout_ms = 10000;
  int64_t max_message_bytes = int64_t{256} << 20;
  int64_t credit_bytes = int64_t{64} << 20;

  // Where each value came from: "flag --x", "environment PRECONDOR_X", "file F" or "default". By option name.
  std::map<std::string, std::string> origins;
};

// What workers of a server dial unless the coordinator knows it by another name: `advertise`, or else the first of
// `listen`, whose port may still be 0.
std::string DialAddress(const ServerConfig& config);

// host:port of `trace_endpoint`; empty: it is no URL of http:// with nothing but them.
std::string TraceCollector(const ServerConfig& config);

// The first of `listen` that takes plaintext from other hosts; empty: none.
std::string OpenAddress(const ServerConfig& config);

absl::string_view ServerRoleName(ServerRole role);  // "all", "shard", "coordinator"

// What the command line asks for beside running.
enum class ConfigAction : uint8_t { kRun, kHelp, kVersion, kCheck, kPrint };

struct ParsedConfig {
  ServerConfig config;
  ConfigAction action = ConfigAction::kRun;
};

// Environment variables by name.
using Environment = std::map<std::string, std::string>;
Environment ProcessEnvironment();  // those of this process that begin with PRECONDOR_

// `arguments` without the program's name; of a flag given twice the last counts, a key twice in the file is an error.
// InvalidArgument names the source, the option, what was expected and what came; an unknown name is an error that
// offers the nearest known one, but in the environment only when it looks like a slip (others have their own variables
// there: Kubernetes makes PRECONDOR_PORT for a service "precondor"). NotFound: the file. Relative paths are those of
// the working directory, also in the file.
absl::StatusOr<ParsedConfig> ParseServerConfig(const std::vector<std::string>& arguments,
                                               const Environment& environment);

// The text of --help: every option with its default, and examples.
std::string ServerHelp();

// The configuration as YAML that --config reads back, each line with where its value came from.
std::string PrintServerConfig(const ServerConfig& config);

}  // namespace precondor
