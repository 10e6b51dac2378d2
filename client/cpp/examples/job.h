// SPDX-License-Identifier: Apache-2.0
// What the parent of the example and its worker processes tell each other: a job down, one JSON object a line up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/cpp/examples/task.h"
#include "client/cpp/examples/trainer.h"

namespace precondor::digits {

// What all workers do, one run after the other.
struct Job {
  std::string data_path;
  std::string coordinator;
  std::string session_prefix;  // run i is session "<prefix>-<i>"
  int32_t workers = 1;
  int64_t reducer_elements = 0;  // SharedReducer::Shape::max_elements
  int32_t worker_restarts = 0;   // workers ended by a signal that are started again, in all
  std::string checkpoint_dir;    // of the workers; set when worker_restarts is
  std::vector<Run> runs;
};

// Steps in a row in one mode, and what they took. Bytes as in RunResult.
struct Stretch {
  uint64_t first_step = 0;
  Mode mode = Mode::kSecondOrder;
  int64_t steps = 0;
  double seconds = 0;
  int64_t statistics_bytes = 0;
  int64_t gradient_bytes = 0;
};

// What one run gave. Bytes are payload, summed over the steps; over one worker when it comes from one.
struct RunResult {
  std::vector<CurvePoint> curve;
  double seconds = 0;
  int64_t steps = 0;
  int64_t skipped_steps = 0;
  int64_t statistics_bytes = 0;
  int64_t gradient_bytes = 0;      // both directions
  uint64_t weights_hash = 0;       // of the final weights' bits
  std::vector<Stretch> stretches;  // in order; empty in process
};

// A line from a worker: progress of a run, or its end.
struct WorkerReport {
  int64_t run = 0;
  bool done = false;
  CurvePoint point;  // when not done
  RunResult result;  // when done; curve from rank 0 alone
};

// Decoding gives InvalidArgument for anything that encoding did not write.
std::string EncodeJob(const Job& job);
absl::StatusOr<Job> DecodeJob(absl::string_view text);
std::string EncodeReport(const WorkerReport& report);  // one line, without its end
absl::StatusOr<WorkerReport> DecodeReport(absl::string_view line);

// FNV-1a of the weights' bits: equal replicas have equal hashes.
uint64_t HashWeights(const std::vector<HostMatrix>& weights);

}  // namespace precondor::digits
