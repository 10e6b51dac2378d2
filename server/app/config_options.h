// SPDX-License-Identifier: Apache-2.0
// The values of a server's options, and the table from which flags, environment variables, keys of the file and --help
// are made.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

enum class ServerRole : uint8_t { kAll, kShard, kCoordinator };

inline absl::string_view ServerRoleName(ServerRole role) {
  switch (role) {
    case ServerRole::kAll:
      return "all";
    case ServerRole::kShard:
      return "shard";
    case ServerRole::kCoordinator:
      return "coordinator";
  }
  return "unknown";
}

struct ServerConfig {
  ServerRole role = ServerRole::kAll;
  std::vector<std::string> listen = {"127.0.0.1:7070"};
  std::string port_file;
  std::string advertise;
  std::vector<std::string> shards;
  std::string backend = "auto";
  int64_t cuda_device = 0;
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
  int64_t shared_memory_bytes = int64_t{128} << 20;
  int64_t transport_memory = int64_t{512} << 20;  // by default at least twice max_message_bytes
  int64_t credit_bytes = int64_t{64} << 20;

  // Source of each value: "flag --x", "environment PRECONDOR_X", "file F" or "default". By option name.
  std::map<std::string, std::string> origins;
};

struct Option {
  std::string name;   // as in YAML; flags use '-' for '_', environment variables upper case
  std::string value;  // what --help calls the value; the default of BYTES and MILLISECONDS is shown with a larger unit
  std::string help;   // sentences
  std::function<absl::Status(ServerConfig&, absl::string_view)> set;  // its error says what was expected
  std::function<std::string(const ServerConfig&)> get;
  bool list = false;  // whether the file may contain a list
  std::string topic = {};
};

// Returns all options. Those of one topic follow each other.
const std::vector<Option>& Options();

std::string FlagName(absl::string_view option);

}  // namespace precondor
