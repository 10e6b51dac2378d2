// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_options.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/model_shapes.h"
#include "kernels/base/status_macros.h"

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

}  // namespace

absl::StatusOr<PerfOptions> ParsePerfOptions(const std::vector<std::string>& arguments) {
  PerfOptions options;
  absl::string_view for_training;  // last given flag that is for the workload training alone; empty if none
  const auto of_training = [&for_training](absl::string_view name, const FlagSetter& set) -> FlagSetter {
    return [&for_training, name, set](absl::string_view value) { return for_training = name, set(value); };
  };
  const std::vector<Flag> flags = {
      {"workers", [&options](absl::string_view value) { return SetWorkers(value, options); }, kCount},
      {"method", of_training("--method", Text(options.method))},
      {"exchange", of_training("--exchange", Choice(options.exchange, ExchangeMode::kReplay, ExchangeModeName)),
       "DIRECT, DELEGATE, REPLAY or PULL_FACTORS"},
      {"steps", Count(options.steps), kCount},
      {"seconds", of_training("--seconds", Count(options.seconds)), kCount},
      {"warmup", Count(options.warmup), kCount},
      {"rank", Count(options.rank), kCount},
      {"threads", Count(options.threads), kCount},
      {"scale", Count(options.scale), kCount},
      {"workload", Text(options.workload)},
      {"server-binary", Text(options.server_binary)},
      {"server", Text(options.server)},
      {"data-dir", Text(options.data_dir)},
      {"json", Text(options.json)},
      {"csv", Text(options.csv)},
      {"preset", Text(options.preset)},
      {"layers", Text(options.layers)},
      {"tls-ca", Text(options.security.tls_ca)},
      {"tls-cert", Text(options.security.tls_cert)},
      {"tls-key", Text(options.security.tls_key)},
  };
  PRECONDOR_ASSIGN_OR_RETURN(const bool measures, ParseFlags(arguments, flags));
  if (!measures) {
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
  if (!training && !for_training.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(for_training, ": for the workload training only"));
  }
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
  return R"(Usage: precondor-perf --workload=NAME (--server-binary=FILE | --server=HOST:PORT) [FLAGS]

Workloads
  training    steps as a job makes them, with the layers of --preset or --layers: statistics at every tenth step, a vector a
              side and worker, and a gradient of each layer and its answer. A row as of a sweep, below, for each number of --workers; windows have whole
              tens of steps. This program holds a gradient and an answer of each layer that a rank sends: see --scale.
  gradients   gradients there and back, method identity, one worker: GB/s by size against plain TCP on loopback in the
              same run, and the latency of small tensors. With --preset or --layers the sizes are those of the layers, at
              most the 8 that most layers have.
  plan        the seconds that precondorctl plan computes for steps with the layers of --preset or --layers (mkor, DELEGATE,
              statistics at every tenth step, one shard) against those that they take here: measures the rates of network
              and arithmetic with every second layer, plans all layers with these, and runs them. Fails where a step is not
              within 20% of the plan.

Flags
  --server-binary=FILE  a precondor-server to start on loopback and stop
  --server=HOST:PORT    one that is there, or unix:/path/to/socket
  --workers=8  --steps=60  --warmup=40  --rank=128
  --workers=1,2,4,8     a sweep: for each number a row of a whole step's p50 and p99, steps a second and payload. Measures
                        windows of a third of --steps until the last three are within 10% of each other, at most 9, and
                        says when they are not. Its --json and --csv have these columns
  --seconds=N           windows of a third of so many seconds, in place of --steps
  --method=mkor  --exchange=DIRECT
                        of the workload training; DIRECT, DELEGATE, REPLAY or PULL_FACTORS
  --threads=2           of the server that is started
  --tls-ca=FILE --tls-cert=FILE --tls-key=FILE
                        gradients over TLS, by rows of their own; a server that is started has the certificate
  --data-dir=DIR        of the server that is started: what its log costs is the difference to a run without
  --preset=NAME         layers of resnet50, bert-large, gpt2-xl or llama2-7b, without biases
  --layers=FILE         or of a file: [{"name": "fc*", "d_out": 4096, "d_in": 1024, "count": 24}]
  --scale=1             divides the dimensions of these, for a small machine
  --json=FILE           the rows {name, value, unit, limit, ratio, target, pass}
  --csv=FILE            the rows, a line each

Exit code: 0 measured, every target met; 1 failed or a target missed; 2 wrong usage.

Examples
  precondor-perf --workload=training --preset=gpt2-xl --scale=8 --server-binary=precondor-server --csv=rows.csv
  precondor-perf --workload=training --preset=bert-large --workers=1,2,4,8 --server-binary=precondor-server
  precondor-perf --workload=training --preset=resnet50 --method=soap --seconds=30 --server=unix:/run/precondor.sock
  precondor-perf --workload=plan --preset=bert-large --scale=4 --workers=1 --server-binary=precondor-server
  precondor-perf --workload=gradients --layers=model.json --server=gpu0:7070
)";
}

}  // namespace precondor
