// SPDX-License-Identifier: Apache-2.0
// precondor-perf: puts load on a server and reports measurements.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <malloc.h>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/perf.h"
#include "client/cpp/tools/perf_training.h"

namespace {

// The output of a run.
struct Report {
  std::string table, json;
  bool pass = true;
};

absl::StatusOr<Report> Measure(const precondor::PerfOptions& options) {
  const auto server = precondor::PerfServer::Start(options);
  if (!server.ok()) return server.status();
  if (options.workload == "training") {
    const auto rows = precondor::MeasureSweep(options, **server);
    if (!rows.ok()) return rows.status();
    return Report{precondor::SweepTable(*rows), precondor::SweepJson(*rows)};
  }
  const auto measure = options.workload == "plan" ? precondor::MeasurePlan : precondor::MeasureGradients;
  const auto rows = measure(options, **server);
  if (!rows.ok()) return rows.status();
  const bool pass = std::all_of(rows->begin(), rows->end(), [](const precondor::PerfRow& row) { return row.pass; });
  return Report{precondor::RowsTable(*rows), precondor::RowsJson(*rows), pass};
}

// Writes the text to the file, which it creates or replaces; without a path, does nothing.
bool Write(const std::string& path, const std::string& text, std::ios::openmode mode = std::ios::trunc) {
  if (path.empty()) return true;
  std::ofstream file(path, mode);
  file << text;
  if (file.flush()) return true;
  std::cerr << "precondor-perf: cannot write " << path << "\n";
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  // The process keeps large blocks, because to return them to the system costs more than the copies that they are for.
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
  if (!Write(options->json, "", std::ios::app)) return 1;  // before minutes are measured for nothing
  const auto report = Measure(*options);
  if (!report.ok()) {
    std::cerr << "precondor-perf: " << report.status().message() << "\n";
    return 1;
  }
  std::cout << report->table;
  if (!Write(options->json, report->json)) return 1;
  return report->pass ? 0 : 1;
}
