// SPDX-License-Identifier: Apache-2.0
#include "server/app/config_options.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr int kMostDevice = 1023;
constexpr absl::string_view kBytes = "BYTES";

absl::Status Expected(absl::string_view what) { return absl::InvalidArgumentError(what); }

Option TextOption(std::string name, std::string ServerConfig::*field, std::string value, std::string help) {
  return {std::move(name), std::move(value), std::move(help),
          [field](ServerConfig& config, absl::string_view text) {
            config.*field = std::string(text);
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return config.*field; }};
}

Option ChoiceOption(std::string name, std::string ServerConfig::*field, std::vector<std::string> choices,
                    std::string help) {
  Option option = TextOption(std::move(name), field, absl::StrJoin(choices, "|"), std::move(help));
  option.set = [field, choices](ServerConfig& config, absl::string_view text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) return Expected(absl::StrJoin(choices, ", "));
    config.*field = std::string(text);
    return absl::OkStatus();
  };
  return option;
}

// Parses "8GiB", "512MiB" or "4096". Returns -1 if the text has another form.
int64_t ParseBytes(absl::string_view text) {
  int64_t unit = 1;
  for (const auto& [suffix, shift] : std::map<std::string, int>{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    if (absl::EndsWith(text, suffix)) {
      unit = int64_t{1} << shift;
      text.remove_suffix(suffix.size());
      break;
    }
  }
  int64_t number = 0;
  return absl::SimpleAtoi(text, &number) && number >= 0 && number <= (int64_t{1} << 62) / unit ? number * unit : -1;
}

Option NumberOption(std::string name, int64_t ServerConfig::*field, int64_t low, int64_t high, std::string value,
                    std::string help) {
  const bool bytes = value == kBytes;
  return {std::move(name), std::move(value), std::move(help),
          [=](ServerConfig& config, absl::string_view text) {
            int64_t number = 0;
            const bool parsed = bytes ? (number = ParseBytes(text)) >= 0 : absl::SimpleAtoi(text, &number);
            if (!parsed || number < low || number > high) {
              return Expected(absl::StrCat(bytes ? "bytes such as 4096, 512MiB or 8GiB" : "a whole number", " in ", low,
                                           " ... ", high));
            }
            config.*field = number;
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrCat(config.*field); }};
}

// The printed text has enough digits to give the number back.
Option FractionOption(std::string name, double ServerConfig::*field, std::string help) {
  return {std::move(name), "FRACTION", std::move(help),
          [field](ServerConfig& config, absl::string_view text) {
            double number = 0;
            if (!absl::SimpleAtod(text, &number) || !(number >= 0 && number <= 1))
              return Expected("a number in 0 ... 1");
            config.*field = number;
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrFormat("%.17g", config.*field); }};
}

Option RoleOption() {
  return {"role", "all|shard|coordinator",
          "The process is a shard, a coordinator, or with all a coordinator with one shard.",
          [](ServerConfig& config, absl::string_view text) {
            for (ServerRole role : {ServerRole::kAll, ServerRole::kShard, ServerRole::kCoordinator}) {
              if (text != ServerRoleName(role)) continue;
              config.role = role;
              return absl::OkStatus();
            }
            return Expected("all, shard or coordinator");
          },
          [](const ServerConfig& config) { return std::string(ServerRoleName(config.role)); }};
}

Option ListOption(const char* name, std::vector<std::string> ServerConfig::*field, const char* value,
                  const char* help) {
  return {name,
          value,
          help,
          [field](ServerConfig& config, absl::string_view text) {
            (config.*field).clear();
            for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
              (config.*field).emplace_back(absl::StripAsciiWhitespace(part));
            }
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrJoin(config.*field, ","); },
          true};
}

Option StepsOption(std::string name, int64_t ServerConfig::*field, int64_t low, int64_t high, std::string help) {
  return NumberOption(std::move(name), field, low, high, "STEPS", std::move(help));
}
Option BytesOption(std::string name, int64_t ServerConfig::*field, int64_t low, int64_t high, std::string help) {
  return NumberOption(std::move(name), field, low, high, std::string(kBytes), std::move(help));
}
Option TimeOption(std::string name, int64_t ServerConfig::*field, int64_t low, std::string help) {
  return NumberOption(std::move(name), field, low, /*an hour*/ 3600 * 1000, "MILLISECONDS", std::move(help));
}

constexpr int64_t kAnyBytes = int64_t{1} << 50;
using C = ServerConfig;

std::vector<Option> AddressOptions() {
  return {
      RoleOption(),
      ListOption("listen", &C::listen, "ADDRESS,...",
                 "The server takes calls at these addresses: host:port, where port 0 takes a free one, or "
                 "unix:/path/to/socket for this user's processes on this host."),
      TextOption("advertise", &C::advertise, "ADDRESS",
                 "Workers dial this address. Without it, they dial the coordinator's name for the shard, or the first "
                 "address of --listen. Role all needs it if that is a wildcard."),
      ListOption("shards", &C::shards, "ADDRESS,...", "A coordinator places layers on these shards."),
      TextOption("port_file", &C::port_file, "FILE",
                 "The server writes its first gRPC port, or its first address if it has no port, to this file once it "
                 "accepts calls."),
      NumberOption("exit_with_pid", &C::exit_with_pid, 0, 1 << 22, "PID",
                   "The server ends when the process with this id ends. 0 means no process."),
  };
}

std::vector<Option> SecurityOptions() {
  return {
      ChoiceOption("plaintext", &C::plaintext, {"loopback", "any"},
                   "A server without --tls-cert listens on loopback only. With any, every client that reaches the port "
                   "can read and change everything."),
      TextOption("tls_cert", &C::tls_cert, "FILE",
                 "This PEM file has the server's certificate and the intermediate certificates. Every host:port of "
                 "--listen then takes TLS only. A changed file is read again."),
      TextOption("tls_key", &C::tls_key, "FILE", "This file has the private key of --tls-cert."),
      TextOption("tls_client_ca", &C::tls_client_ca, "FILE",
                 "Every client needs a certificate that an authority in this file has signed."),
      TextOption("access_file", &C::access_file, "FILE",
                 "This file says which tokens and certificate names may call what. Without it, every client that can "
                 "connect may call everything."),
      TextOption(
          "tls_ca", &C::tls_ca, "FILE",
          "A coordinator accepts shards whose certificates an authority in this file has signed. Without it, the "
          "coordinator dials shards in plaintext."),
      TextOption("token_file", &C::token_file, "FILE", "A coordinator sends the token in this file to its shards."),
  };
}

std::vector<Option> DeviceOptions() {
  return {
      ChoiceOption("backend", &C::backend, {"auto", "cpu", "cuda"},
                   "A shard computes on this kind of device. With auto, it is cuda where a device can be used, else "
                   "cpu. A data directory keeps its backend."),
      NumberOption("cuda_device", &C::cuda_device, 0, kMostDevice, "NUMBER",
                   "A shard uses the CUDA device with this number."),
      NumberOption(
          "threads", &C::threads, 0, 1024, "THREADS",
          "A shard computes with this many threads, on cuda with this many layers at once. 0 means the cores, on "
          "cuda 512 layers."),
  };
}

std::vector<Option> MemoryOptions() {
  return {
      BytesOption("memory_limit", &C::memory_limit_bytes, 1 << 20, kAnyBytes,
                  "Sessions may reserve this much memory on a shard's device, or on a coordinator. The default of a "
                  "coordinator is 128 MiB."),
      BytesOption(
          "device_plane_bytes", &C::device_plane_bytes, 0, kAnyBytes,
          "On cuda, a stream from this host over a unix: address may have a ring of this size in device memory. "
          "0 means no ring."),
      BytesOption("max_message_bytes", &C::max_message_bytes, 4 << 20, (int64_t{1} << 31) - 1,
                  "The server refuses larger gRPC messages."),
      BytesOption(
          "transport_memory", &C::transport_memory, 8 << 20, kAnyBytes,
          "gRPC may hold this much of incomplete messages and unread answers, for all connections together. The "
          "default is at least twice --max-message-bytes."),
      BytesOption("shared_memory_bytes", &C::shared_memory_bytes, 0, kAnyBytes,
                  "Workers of this host and user may send their messages through this much shared memory, about 8 MiB "
                  "a stream. Others use gRPC. 0 means that all do."),
      BytesOption("credit_bytes", &C::credit_bytes, 1 << 20, kAnyBytes,
                  "A stream may have this much payload that the server has not acknowledged."),
  };
}

std::vector<Option> StepOptions() {
  return {
      StepsOption("window_steps", &C::window_steps, 2, 64, "A layer may have this many open steps."),
      StepsOption("lease_steps", &C::lease_steps, 1, 1 << 20,
                  "A coordinator lets workers begin this many steps beyond the last reported step."),
      TimeOption("slow_worker_ms", &C::slow_worker_ms, 0,
                 "Log and metrics name the workers that a step has waited for this long. 0 means never."),
  };
}

std::vector<Option> StorageOptions() {
  return {
      TextOption("data_dir", &C::data_dir, "DIR",
                 "The server recovers from this directory after a crash. One server owns it. Without it, the server "
                 "keeps nothing."),
      StepsOption("snapshot_interval_steps", &C::snapshot_interval_steps, 0, 1 << 30,
                  "A shard writes a snapshot of a session to --data-dir after this many steps. 0 means none."),
      BytesOption("gradient_journal_bytes", &C::gradient_journal_bytes, 0, kAnyBytes,
                  "A shard takes a snapshot after this many bytes of journalled gradients. With 0, gradients are not "
                  "journalled, and a crash loses updates of methods that learn from them."),
      NumberOption("quarantine_days", &C::quarantine_days, 0, 36500, "DAYS",
                   "A shard keeps the files of sessions that its coordinator does not know for this many days of "
                   "running time. 0 means without limit."),
      StepsOption(
          "session_snapshot_steps", &C::session_snapshot_steps, 0, 1 << 30,
          "A coordinator takes a snapshot of a whole session, on all shards at one step, after this many steps. "
          "0 means only on request."),
      ListOption("etcd_endpoints", &C::etcd_endpoints, "HOST:PORT,...",
                 "A coordinator keeps its journal in the etcd with these members, in place of --data-dir. One of "
                 "several coordinators leads."),
      TextOption("etcd_prefix", &C::etcd_prefix, "PREFIX", "The etcd keys of this deployment begin with this prefix."),
      TimeOption("etcd_lease_ms", &C::etcd_lease_ms, 1000,
                 "Another coordinator takes over after this much silence, in whole seconds."),
  };
}

std::vector<Option> ShardCallOptions() {
  return {
      TimeOption("reconcile_interval_ms", &C::reconcile_interval_ms, 10,
                 "A coordinator checks what its shards hold after each such pause."),
      TimeOption("shard_timeout_ms", &C::shard_timeout_ms, 1, "A coordinator's call to a shard fails after this time."),
  };
}

std::vector<Option> TenantOptions() {
  return {
      NumberOption(
          "tenant_max_sessions", &C::tenant_max_sessions, 0, 1 << 20, "SESSIONS",
          "On a coordinator, each tenant may have this many open sessions. Without --access-file, all clients are one "
          "tenant. 0 means any number."),
      BytesOption("tenant_max_bytes", &C::tenant_max_bytes, 0, kAnyBytes,
                  "On a coordinator, the sessions of each tenant may reserve this much for factors and staging on all "
                  "shards together. Without --access-file, all clients are one tenant. 0 means any amount."),
      NumberOption(
          "tenant_max_calls", &C::tenant_max_calls, 0, 1 << 30, "CALLS",
          "Each tenant of --access-file may begin this many calls a second on this server. 0 means any number."),
  };
}

std::vector<Option> ObservationOptions() {
  return {
      TextOption("metrics_listen", &C::metrics_listen, "HOST:PORT",
                 "The server has Prometheus metrics and a status page at this address."),
      TextOption("metrics_port_file", &C::metrics_port_file, "FILE",
                 "The server writes the port of --metrics-listen to this file."),
      ChoiceOption("log_format", &C::log_format, {"text", "json"}, "Each log line on standard error has this form."),
      ChoiceOption("log_level", &C::log_level, {"debug", "info", "warning", "error"},
                   "The log has events of this severity and above."),
      TextOption("trace_endpoint", &C::trace_endpoint, "URL",
                 "The collector at this address, such as http://localhost:4318, gets spans as OTLP/HTTP in JSON. "
                 "Without it, the server makes no spans."),
      FractionOption("trace_ratio", &C::trace_ratio,
                     "This fraction of the training steps has spans. All servers of a deployment need one value."),
      TimeOption("drain_deadline_ms", &C::drain_deadline_ms, 0,
                 "The server waits this long for work in flight after SIGTERM."),
  };
}

}  // namespace

const std::vector<Option>& Options() {
  static const std::vector<Option>& options = *[] {
    auto* all = new std::vector<Option>;
    const auto add = [all](absl::string_view topic, std::vector<Option> some) {
      for (Option& option : some) {
        option.topic = std::string(topic);
        all->push_back(std::move(option));
      }
    };
    add("Role and addresses", AddressOptions());
    add("Security", SecurityOptions());
    add("Devices of a shard", DeviceOptions());
    add("Memory", MemoryOptions());
    add("Steps", StepOptions());
    add("Storage and recovery", StorageOptions());
    add("A coordinator and its shards", ShardCallOptions());
    add("Tenants", TenantOptions());
    add("Metrics, logs, traces and the end", ObservationOptions());
    return all;
  }();
  return options;
}

std::string FlagName(absl::string_view option) { return absl::StrCat("--", absl::StrReplaceAll(option, {{"_", "-"}})); }

}  // namespace precondor
