// SPDX-License-Identifier: Apache-2.0
// A step of BERT-Large's 144 linear layers on a device, as a shard's threads do it: an update of every layer's factors
// by one vector a side and the precondition of every layer's gradient, in tasks that run together.
#pragma once

#include <string>
#include <vector>

#include "tests/bench/bench_rows.h"
#include "tests/bench/cuda_timer.h"

namespace precondor {

// The device's rates a second, as this process has measured them; 0: not measured.
struct DeviceLimits {
  double bytes = 0;       // of a copy, read and written
  double f32_flops = 0;   // of products in f32
  double bf16_flops = 0;  // of products in bf16, on tensor cores
};

// The steps there are, each the name of its first row: "step/cuda/low_rank_64".
std::vector<std::string> CudaStepNames(BenchMode mode);

// The rows of one of them. Answers are compared with the definition in doubles first; a wrong one aborts. None when a
// profiler measures.
std::vector<BenchRow> MeasureCudaStep(const std::string& name, BenchMode mode, const DeviceLimits& limits);

}  // namespace precondor
