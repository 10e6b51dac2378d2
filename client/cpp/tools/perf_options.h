// SPDX-License-Identifier: Apache-2.0
// The command line of precondor-perf.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/client_security.h"
#include "kernels/base/session_spec.h"

namespace precondor {

struct PerfOptions {
  std::string workload;       // "bert-large", "statistics", "training", "gradients", "jobs", "plan", "help"
  std::string server_binary;  // started on loopback for the run
  std::string server;         // or one that is there: host:port or unix:/path
  int64_t workers = 8;
  std::vector<int64_t> sweep;  // numbers of workers, one run each; empty: `workers` alone, and no sweep
  int64_t steps = 60;          // measured, of each run
  int64_t seconds = 0;         // of a sweep, in place of `steps`; 0: `steps`
  int64_t warmup = 40;         // before: fills the windows of the low-rank factors
  int64_t rank = 128;
  std::string method = "mkor";                    // of the workload training
  ExchangeMode exchange = ExchangeMode::kDirect;  // of the workload training
  int64_t threads = 2;                            // of the server that is started
  std::string data_dir;                           // of the server that is started; empty: it keeps nothing
  ClientSecurity security;  // of the workload gradients; a server that is started has the certificate, too
  std::string json;         // file for the rows
  std::string csv;          // file for the rows, a line each
  std::string preset;       // a model of model_shapes.h whose layers are the load
  std::string layers;       // or a file with a layer table
  int64_t scale = 1;        // divides the dimensions of these
};

// InvalidArgument says what is wrong with which argument.
absl::StatusOr<PerfOptions> ParsePerfOptions(const std::vector<std::string>& arguments);
absl::string_view PerfHelp();

// The layers of --preset or --layers, without columns for biases; empty where neither is given. Errors are those of the
// table's reader.
absl::StatusOr<std::vector<LayerSpec>> PerfLayers(const PerfOptions& options);

}  // namespace precondor
