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
  std::string workload;       // "training", "gradients", "plan", "help"
  std::string server_binary;  // started on loopback for the run
  std::string server;         // or the address of a running one: host:port or unix:/path
  int64_t workers = 8;
  std::vector<int64_t> sweep;  // of the workload training: numbers of workers, a run for each
  int64_t steps = 60;          // measured steps of each run
  int64_t seconds = 0;         // measured seconds of each run of a sweep; 0 means `steps` instead
  int64_t warmup = 40;         // steps before them, which fill the windows of low-rank factors
  int64_t rank = 128;
  std::string method = "mkor";                    // for the workload training
  ExchangeMode exchange = ExchangeMode::kDirect;  // for the workload training
  int64_t threads = 2;                            // of a started server
  std::string data_dir;                           // of a started server; empty: it stores nothing
  ClientSecurity security;  // for the workload gradients; a started server has the certificate, too
  std::string json;         // file for the rows
  std::string preset;       // a model of model_shapes.h, whose layers are the workload
  std::string layers;       // or a file with a layer table
  int64_t scale = 1;        // divides the layers' dimensions
};

// Parses the arguments after the program's name. Returns InvalidArgument, which names the wrong argument and the
// problem.
absl::StatusOr<PerfOptions> ParsePerfOptions(const std::vector<std::string>& arguments);
absl::string_view PerfHelp();

// Returns the layers of --preset or --layers, without columns for biases; empty if neither is given. Returns the errors
// of PresetShapes, ReadLayerTable and ExpandLayers.
absl::StatusOr<std::vector<LayerSpec>> PerfLayers(const PerfOptions& options);

}  // namespace precondor
