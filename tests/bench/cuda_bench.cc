// SPDX-License-Identifier: Apache-2.0
// Measures the CUDA backend: a device's limits and whole steps (cuda_timer.h), as a list of cases that
// each have a name. It runs on a device, or on tests/support/cuda_host.
//
//   cuda_bench --json=FILE | --lines  [--short] [--profile] [--only=NAME,...] [--list]
//
// --json=FILE writes all rows when the program ends. --lines writes one JSON object a line to the standard output as
// results come, so that a reader has all earlier rows if the program crashes:
//   {"begin": NAME}   a case begins; only after an earlier case has ended
//   {"name": ...}     a row (bench_rows.h)
//   {"end": NAME, "error": null or TEXT}
// --profile runs each case once between cudaProfilerStart and cudaProfilerStop and writes no rows.
// Exit status: 0; 1 when a case failed; 2 for bad arguments; 3 when a fault has ended the device's use, in which case
// the cases that have not begun are left out; 77 without a device.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "kernels/base/process_setup.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/cuda_timer.h"

namespace precondor {
namespace {

constexpr char kLimits[] = "limit/cuda";
constexpr int kFailed = 1, kBadArguments = 2, kDeviceLost = 3;

using Rows = std::vector<BenchRow>;

struct BenchCase {
  std::string name;
  std::function<absl::StatusOr<Rows>(CudaLimits&)> run;
};

std::vector<BenchCase> Cases(BenchMode mode) {
  std::vector<BenchCase> cases;
  cases.push_back({kLimits, [](CudaLimits& limits) { return limits.Measure(); }});
  for (const std::string& name : CudaStepNames(mode)) {
    cases.push_back({name, [=](CudaLimits& limits) { return MeasureCudaStep(name, mode, limits.found()); }});
  }
  return cases;
}

struct Options {
  BenchMode mode;
  std::string json;
  bool lines = false, list = false;
  std::set<std::string> only;  // empty: all
};

// False, with a message, for arguments that it does not take.
bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--json=")) {
      options.json = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--only=")) {
      for (const absl::string_view name : absl::StrSplit(argument, ',')) options.only.emplace(name);
    } else if (argument == "--short") {
      options.mode.is_short = true;
    } else if (argument == "--profile") {
      options.mode.profile = true;
    } else if (argument == "--lines") {
      options.lines = true;
    } else if (argument == "--list") {
      options.list = true;
    } else {
      std::cerr << "cuda_bench: unknown argument " << argument << "\n";
      return false;
    }
  }
  if (options.json.empty() && !options.lines && !options.list && !options.mode.profile) {
    std::cerr << "cuda_bench: expected --json=FILE, --lines, --profile or --list\n";
    return false;
  }
  return true;
}

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}, {"\t", " "}}),
                      "\"");
}

class Output {
 public:
  explicit Output(const Options& options) : options_(options) {}
  void Begin(const std::string& name) const { Line(absl::StrCat("{\"begin\": ", Quoted(name), "}")); }
  void Take(const Rows& rows) {
    for (const BenchRow& row : rows) Line(RowJson(row));
    rows_.insert(rows_.end(), rows.begin(), rows.end());
  }
  void End(const std::string& name, const absl::Status& status) const {
    Line(absl::StrCat("{\"end\": ", Quoted(name), ", \"error\": ", status.ok() ? "null" : Quoted(status.ToString()),
                      "}"));
    if (!status.ok()) std::cerr << name << ": " << status << "\n";
  }
  void WriteFile() const {
    if (!options_.json.empty()) WriteRows(rows_, options_.json);
  }

 private:
  void Line(const std::string& text) const {
    if (!options_.lines) return;
    std::puts(text.c_str());
    std::fflush(stdout);
  }
  const Options& options_;
  Rows rows_;
};

int Main(int argc, char** argv) {
  KeepLargeBlocks();  // as a server does
  Options options;
  if (!Parse(argc, argv, options)) return kBadArguments;
  const std::vector<BenchCase> cases = Cases(options.mode);
  if (options.list) {
    for (const BenchCase& each : cases) std::puts(each.name.c_str());
    return 0;
  }
  for (const std::string& name : options.only) {
    const auto same = [&](const BenchCase& each) { return each.name == name; };
    if (std::find_if(cases.begin(), cases.end(), same) == cases.end()) {
      std::cerr << "cuda_bench: no case " << name << "; --list writes all\n";
      return kBadArguments;
    }
  }
  const auto chosen = [&](const std::string& name) { return options.only.empty() || options.only.contains(name); };
  CudaLimits limits(options.mode);
  Output output(options);
  int status = 0;
  for (const BenchCase& each : cases) {
    const bool is_limits = each.name == kLimits, reported = chosen(each.name);
    // The other cases are compared with limits that this process measures.
    if (is_limits ? options.mode.profile : !reported) continue;
    if (reported) output.Begin(each.name);
    const absl::StatusOr<Rows> rows = each.run(limits);
    if (reported) {
      if (rows.ok()) output.Take(*rows);
      output.End(each.name, rows.status());
    }
    if (!rows.ok()) status = kFailed;
    if (!limits.fault().ok()) {
      std::cerr << "cuda_bench: " << limits.fault() << "\n";
      status = kDeviceLost;
      break;
    }
  }
  output.WriteFile();
  return status;
}

}  // namespace
}  // namespace precondor

int main(int argc, char** argv) { return precondor::Main(argc, argv); }
