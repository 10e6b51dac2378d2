// SPDX-License-Identifier: Apache-2.0
// precondor-perf: its command line, the rows of its reports, the server under test, and two of its workloads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

struct PerfRow {
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<double> limit = std::nullopt;   // reference, for example what the machine allows
  std::optional<double> ratio = std::nullopt;   // value / limit
  std::optional<double> target = std::nullopt;  // greatest value that passes
  bool pass = true;
};

std::string RowsJson(const std::vector<PerfRow>& rows);
std::string RowsTable(const std::vector<PerfRow>& rows);

// Returns the sample below or at which a part `fraction` of the samples lies (nearest rank). Precondition: samples is
// not empty.
double Percentile(std::vector<double> samples, double fraction);

// Owns the server under test. Not thread-safe. The destructor stops a child and waits for its end.
class PerfServer {
 public:
  // Starts options.server_binary, or takes the running server at options.server. Returns NotFound if the child cannot
  // be started, and Unavailable if it does not open its port within 30 s.
  static absl::StatusOr<std::unique_ptr<PerfServer>> Start(const PerfOptions& options);
  ~PerfServer();

  const std::string& address() const { return address_; }
  // Returns the child's resident memory in bytes; 0 for a server that was not started here.
  int64_t resident_bytes() const;
  // Returns the processor time in seconds that the child has used, in user and system mode; 0 likewise.
  double processor_seconds() const;

 private:
  PerfServer() = default;
  std::string address_;
  std::string folder_;  // folder of the child's port file
  int pid_ = 0;
};

// Measures the throughput of gradients by size, in GB/s of both directions together, and the latency of small ones.
// Several tensors of a size are in flight at a time, as in a backward pass. The limit of a row is a blocking echo over
// plain TCP in this process. The processor time of both processes has a row of its own.
absl::StatusOr<std::vector<PerfRow>> MeasureGradients(const PerfOptions& options, const PerfServer& server);

// Measures the two rates that a plan needs, with every second layer: the network's with method identity, and the
// arithmetic's with mkor and statistics at every tenth step. Then plans a step of all layers, runs these steps, and
// compares. The planned step is the network's time plus that of a shard's arithmetic. Returns the rows of the median of
// three rounds.
absl::StatusOr<std::vector<PerfRow>> MeasurePlan(const PerfOptions& options, const PerfServer& server);

}  // namespace precondor
