// SPDX-License-Identifier: Apache-2.0
// precondor-perf: loads a server and reports what it took.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <malloc.h>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf_gradients.h"
#include "client/cpp/tools/perf_options.h"
#include "client/cpp/tools/perf_rows.h"
#include "client/cpp/tools/perf_server.h"
#include "client/cpp/tools/perf_statistics.h"

namespace {

absl::StatusOr<std::vector<precondor::PerfRow>> Measure(const precondor::PerfOptions& options) {
  const auto server = precondor::PerfServer::Start(options);
  if (!server.ok()) return server.status();
  return options.workload == "gradients" ? precondor::MeasureGradients(options, **server)
                                         : precondor::MeasureStatistics(options, **server);
}

bool Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  if (file.flush()) return true;
  std::cerr << "precondor-perf: cannot write " << path << "\n";
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  // Large blocks stay with the process: giving them back costs more than the copies they carry.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const auto options = precondor::ParsePerfOptions(std::vector<std::string>(argv + 1, argv + argc));
  if (!options.ok()) {
    std::cerr << "precondor-perf: " << options.status().message() << "\nTry precondor-perf --help.\n";
    return 2;
  }
  if (options->workload == "help") {
    std::cout << precondor::PerfHelp();
    return 0;
  }
  const auto rows = Measure(*options);
  if (!rows.ok()) {
    std::cerr << "precondor-perf: " << rows.status().message() << "\n";
    return 1;
  }
  std::cout << precondor::RowsTable(*rows);
  if (!options->json.empty() && !Write(options->json, precondor::RowsJson(*rows))) return 1;
  if (!options->csv.empty() && !Write(options->csv, precondor::RowsCsv(*rows))) return 1;
  return std::all_of(rows->begin(), rows->end(), [](const precondor::PerfRow& row) { return row.pass; }) ? 0 : 1;
}
