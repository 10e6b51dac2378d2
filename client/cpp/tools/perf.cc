// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include <nlohmann/json.hpp>

#include "client/cpp/src/control.h"
#include "client/cpp/tools/ctl_render.h"
#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/model_shapes.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"

extern char** environ;

namespace precondor {
namespace {

// Checks --preset, --layers and --scale.
absl::Status CheckShapes(const PerfOptions& options) {
  const bool given = !options.preset.empty() || !options.layers.empty();
  if (!options.preset.empty() && !options.layers.empty()) {
    return absl::InvalidArgumentError("expected one of --preset and --layers");
  }
  if (!given && options.workload != "gradients") {
    return absl::InvalidArgumentError(absl::StrCat("--workload=", options.workload, ": expected --preset or --layers"));
  }
  if (!given && options.scale != 1) return absl::InvalidArgumentError("--scale: expected --preset or --layers with it");
  if (options.preset.empty()) return absl::OkStatus();
  const absl::Status known = PresetShapes(options.preset).status();
  return known.ok() ? known : absl::InvalidArgumentError(absl::StrCat("--preset: ", known.message()));
}

constexpr char kCount[] = "1 ... 100000";

FlagSetter Count(int64_t& out) { return Integer(out, 1, 100000); }

bool SetWorkers(absl::string_view value, PerfOptions& options) {
  options.sweep.clear();
  for (const absl::string_view part : absl::StrSplit(value, ',')) {
    if (!Count(options.workers)(part)) return false;
    options.sweep.push_back(options.workers);
  }
  if (options.sweep.size() == 1) options.sweep.clear();
  return true;
}

nlohmann::json Number(const std::optional<double>& value) {
  return value.has_value() ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

std::string Text(const std::optional<double>& value) {
  return value.has_value() ? absl::StrFormat("%.4g", *value) : "-";
}

}  // namespace

absl::StatusOr<PerfOptions> ParsePerfOptions(const std::vector<std::string>& arguments) {
  PerfOptions options;
  const std::string training_only = "workload training";
  const std::vector<Flag> flags = {
      {"workers", [&options](absl::string_view value) { return SetWorkers(value, options); }, kCount},
      {"method", Text(options.method), "", training_only},
      {"exchange", Choice(options.exchange, ExchangeMode::kReplay, ExchangeModeName),
       "DIRECT, DELEGATE, REPLAY or PULL_FACTORS", training_only},
      {"steps", Count(options.steps), kCount},
      {"seconds", Count(options.seconds), kCount, training_only},
      {"warmup", Count(options.warmup), kCount},
      {"rank", Count(options.rank), kCount},
      {"threads", Count(options.threads), kCount},
      {"scale", Count(options.scale), kCount},
      {"workload", Text(options.workload)},
      {"server-binary", Text(options.server_binary)},
      {"server", Text(options.server)},
      {"data-dir", Text(options.data_dir)},
      {"json", Text(options.json)},
      {"preset", Text(options.preset)},
      {"layers", Text(options.layers)},
      {"tls-ca", Text(options.security.tls_ca)},
      {"tls-cert", Text(options.security.tls_cert)},
      {"tls-key", Text(options.security.tls_key)},
  };
  PRECONDOR_ASSIGN_OR_RETURN(const ParsedOptions given, ParseFlags(arguments, flags));
  if (given.help) {
    options.workload = "help";
    return options;
  }
  const bool training = options.workload == "training";
  if (!training && options.workload != "gradients" && options.workload != "plan") {
    return absl::InvalidArgumentError(
        absl::StrCat("--workload: expected training, gradients or plan, got \"", options.workload, "\""));
  }
  if (options.server.empty() == options.server_binary.empty()) {
    return absl::InvalidArgumentError("expected one of --server-binary and --server");
  }
  if (!options.data_dir.empty() && options.server_binary.empty()) {
    return absl::InvalidArgumentError("--data-dir: for a server that is started, needs --server-binary");
  }
  if (!options.sweep.empty() && !training) {
    return absl::InvalidArgumentError("--workers: several numbers are for the workload training only");
  }
  if (training && options.sweep.empty()) options.sweep = {options.workers};
  PRECONDOR_RETURN_IF_ERROR(given.CheckCommand(absl::StrCat("workload ", options.workload)));
  if (!options.security.tls_ca.empty() && options.workload != "gradients") {
    return absl::InvalidArgumentError("--tls-ca: for the workload gradients only");
  }
  PRECONDOR_RETURN_IF_ERROR(CheckShapes(options));
  return options;
}

absl::StatusOr<std::vector<LayerSpec>> PerfLayers(const PerfOptions& options) {
  if (options.preset.empty() && options.layers.empty()) return std::vector<LayerSpec>();
  PRECONDOR_ASSIGN_OR_RETURN(const ModelShapes model,
                             options.layers.empty() ? PresetShapes(options.preset) : ReadLayerTable(options.layers));
  return ExpandLayers(model, {.scale = options.scale, .fold_biases = false});
}

absl::string_view PerfHelp() {
  return R"(precondor-perf: measures a server under load.

Usage: precondor-perf --workload=NAME (--server-binary=FILE | --server=ADDRESS) [FLAGS]

Workloads
  training
      Ranks make steps as a job does, with the layers of --preset or --layers. Every tenth step has statistics. The program
      reports p50 and p99 of a step, steps a second and payload for each number of --workers.
  gradients
      One worker sends gradients and reads answers with the method identity. The program reports GB/s by size beside plain
      TCP on loopback, and the latency of small tensors. Sizes are those of at most 8 layers of --preset or --layers.
  plan
      The program compares the seconds of precondorctl plan with those of real steps (mkor, DELEGATE, one shard). It measures
      the rates of network and arithmetic with every second layer. It fails if a step differs by more than 20 % of the plan.

Server
  --server-binary=FILE  default none
      The program starts this precondor-server on loopback, reads its memory, and stops it.
  --server=ADDRESS  default none
      The program uses the running server at host:port or unix:/path/to/socket.
  --threads=N  default 2
      The started server has this many threads.
  --data-dir=DIR  default none
      The started server keeps its log in this directory.
  --tls-ca=FILE  default none
      The workload gradients runs over TLS too. The server's certificate needs the signature of an authority in this file.
  --tls-cert=FILE  default none
      The client, and a started server, show this certificate.
  --tls-key=FILE  default none
      This file has the private key of --tls-cert.

Load
  --preset=NAME  default none
      The layers are those of resnet50, bert-large, gpt2-xl or llama2-7b, without biases.
  --layers=FILE  default none
      The layers are those of a JSON file: [{"name": "fc*", "d_out": 4096, "d_in": 1024, "count": 24}]
  --scale=N  default 1
      The dimensions of the layers are divided by this number.
  --workers=N,...  default 8
      The job has this many ranks. Several numbers make a run for each. A run ends when its last three windows are within
      10 % of each other, or after 9 windows.
  --steps=N  default 60
      The program measures this many steps, in a run with several windows a third of them for each window.
  --seconds=N  default none
      The program measures this many seconds, in place of --steps.
  --warmup=N  default 40
      This many steps precede the measured ones.
  --rank=N  default 128
      Low-rank factors have this rank.
  --method=NAME  default mkor
      The workload training has this method.
  --exchange=DIRECT|DELEGATE|REPLAY|PULL_FACTORS  default DIRECT
      The workload training has this exchange.

Output
  --json=FILE  default none
      The program writes its rows to this file: {name, value, unit, limit, ratio, target, pass}.
  --help
      The program prints this text.

Exit status: 0 measured, and every target met; 1 failed, or a target missed; 2 wrong usage.

Examples
  precondor-perf --workload=training --preset=resnet50 --method=soap --seconds=30 --server=unix:/run/precondor.sock
  precondor-perf --workload=training --preset=bert-large --workers=1,2,4,8 --server-binary=precondor-server
  precondor-perf --workload=plan --preset=bert-large --scale=4 --workers=1 --server-binary=precondor-server
  precondor-perf --workload=gradients --layers=model.json --server=gpu0:7070
)";
}

std::string RowsJson(const std::vector<PerfRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const PerfRow& row : rows) {
    list.push_back({{"name", row.name},
                    {"value", row.value},
                    {"unit", row.unit},
                    {"limit", Number(row.limit)},
                    {"ratio", Number(row.ratio)},
                    {"target", Number(row.target)},
                    {"pass", row.pass}});
  }
  return nlohmann::json{{"rows", list}}.dump(1) + "\n";
}

std::string RowsTable(const std::vector<PerfRow>& rows) {
  std::vector<std::vector<std::string>> cells = {{"NAME", "VALUE", "UNIT", "LIMIT", "RATIO", "TARGET", "PASS"}};
  for (const PerfRow& row : rows) {
    cells.push_back({row.name, Text(row.value), row.unit, Text(row.limit), Text(row.ratio), Text(row.target),
                     row.pass ? "yes" : "NO"});
  }
  return FormatTable(cells);
}

double Percentile(std::vector<double> samples, double fraction) {
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  return samples[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(samples.size()))) - 1];
}

absl::StatusOr<std::unique_ptr<PerfServer>> PerfServer::Start(const PerfOptions& options) {
  std::unique_ptr<PerfServer> server(new PerfServer());
  if (!options.server.empty()) {
    server->address_ = options.server;
    return server;
  }
  char folder[] = "/tmp/precondor-perf-XXXXXX";
  if (mkdtemp(folder) == nullptr) return absl::InternalError("cannot make a folder in /tmp");
  server->folder_ = folder;
  const std::string port_file = server->folder_ + "/port";
  std::vector<std::string> arguments = {options.server_binary, "--listen=127.0.0.1:0",
                                        absl::StrCat("--port-file=", port_file),
                                        absl::StrCat("--threads=", options.threads), "--log-level=error"};
  if (!options.security.tls_cert.empty()) {
    arguments.push_back(absl::StrCat("--tls-cert=", options.security.tls_cert));
    arguments.push_back(absl::StrCat("--tls-key=", options.security.tls_key));
  }
  if (!options.data_dir.empty()) arguments.push_back(absl::StrCat("--data-dir=", options.data_dir));
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  if (posix_spawn(&server->pid_, options.server_binary.c_str(), nullptr, nullptr, pointers.data(), environ) != 0) {
    server->pid_ = 0;
    return absl::NotFoundError(absl::StrCat("cannot start ", options.server_binary));
  }
  const absl::Time deadline = MonotonicNow() + absl::Seconds(30);
  Canceller canceller;
  while (MonotonicNow() < deadline && waitpid(server->pid_, nullptr, WNOHANG) == 0) {
    std::ifstream file(port_file);
    std::string port;
    if (std::getline(file, port) && !port.empty()) {
      server->address_ = port.find(':') == std::string::npos ? absl::StrCat("127.0.0.1:", port) : port;
      return server;
    }
    canceller.Pause(absl::Milliseconds(10));
  }
  return absl::UnavailableError(absl::StrCat(options.server_binary, ": did not open its port"));
}

PerfServer::~PerfServer() {
  if (pid_ != 0) {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  if (!folder_.empty()) {
    unlink((folder_ + "/port").c_str());
    rmdir(folder_.c_str());
  }
}

int64_t PerfServer::resident_bytes() const {
  if (pid_ == 0) return 0;
  std::ifstream file(absl::StrCat("/proc/", pid_, "/statm"));
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

double PerfServer::processor_seconds() const {
  if (pid_ == 0) return 0;
  clockid_t clock = {};
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace precondor
