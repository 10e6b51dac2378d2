// SPDX-License-Identifier: Apache-2.0
// Rows of a server under load: the families statistics/ and memory/, jobs/ or layers/, of tests/bench/run.sh.
#include <fstream>
#include <iostream>
#include <malloc.h>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/perf.h"
#include "tests/bench/service_jobs.h"
#include "tests/bench/service_layers.h"
#include "tests/bench/service_statistics.h"

namespace precondor {
namespace {

constexpr char kUsage[] = R"(Usage: service_bench --rows=statistics|jobs|layers --server-binary=FILE [FLAGS]
  --rows=statistics  statistic steps of BERT-Large's 144 linear layers: workers send one f16 vector a side and layer, the
                     server applies them. p50 and p99 of a whole step, the part that is not kernels (less the time in
                     updates by the server's counters, over its threads; the same with factors of rank 1; and transport
                     alone, with the method identity), and the server's memory against the computed.
  --rows=jobs        a small job (4 layers of 64 x 64, method muon) alone and beside a large one (16 of 384 x 384) on the
                     server, in turns: p50 and p99 of its steps, at most twice as long beside as alone.
  --rows=layers      one worker with 16 layers of 64 x 64, method identity: p50 and p99 of a step, and the processor time
                     of both processes for a layer.
  --server-binary=FILE  the precondor-server to start on loopback and stop; its memory is read
  --json=FILE        the rows {name, value, unit, limit, ratio, target, pass}
  --workers=8  --steps=60  --warmup=40  --rank=128  --threads=2
)";

absl::StatusOr<std::vector<PerfRow>> Measure(const std::string& rows, const PerfOptions& options) {
  const std::map<std::string, decltype(&MeasureJobs)> families = {
      {"jobs", MeasureJobs}, {"layers", MeasureLayers}, {"statistics", MeasureStatistics}};
  const auto family = families.find(rows);
  if (family == families.end()) return absl::InvalidArgumentError("--rows: expected jobs, layers or statistics");
  const auto server = PerfServer::Start(options);
  if (!server.ok()) return server.status();
  return family->second(options, **server);
}

int Main(const std::vector<std::string>& arguments) {
  PerfOptions options;
  options.preset = "bert-large";
  std::string family;
  const auto count = [](int64_t& out) { return Integer(out, 1, 100000); };
  const auto measures = ParseFlags(arguments, {{"rows", Text(family)},
                                               {"server-binary", Text(options.server_binary)},
                                               {"json", Text(options.json)},
                                               {"workers", count(options.workers), "1 ... 100000"},
                                               {"steps", count(options.steps), "1 ... 100000"},
                                               {"warmup", count(options.warmup), "1 ... 100000"},
                                               {"rank", count(options.rank), "1 ... 100000"},
                                               {"threads", count(options.threads), "1 ... 100000"}});
  if (measures.ok() && measures->help) {
    std::cout << kUsage;
    return 0;
  }
  const auto rows = measures.ok() ? Measure(family, options) : measures.status();
  if (!rows.ok()) {
    std::cerr << "service_bench: " << rows.status().message() << "\n";
    return 1;
  }
  std::cout << RowsTable(*rows);
  if (!options.json.empty()) std::ofstream(options.json) << RowsJson(*rows);
  return 0;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) {
  // As precondor-perf has it: to return large blocks to the system costs more than the copies that they are for.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  return precondor::Main({argv + 1, argv + argc});
}
