// SPDX-License-Identifier: Apache-2.0
// Training in one process and through a service: final weights, which tests compare.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "tests/e2e/trainer/model.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::e2e {

// Trains `run` in this process: the course that training through the service takes, but for rounding.
absl::StatusOr<digits::Mlp> TrainInProcess(const digits::Run& run, const digits::DigitsData& data);

struct ServiceRun {
  std::string coordinator;  // host:port
  std::string session;      // its name; unique on the coordinator
  digits::Run run;
  // Not 0: every rank hands its layers over in an order of its own at every step, drawn by this seed. DIRECT only.
  uint64_t shuffle_seed = 0;
};

// Final weights of every rank. The session is closed afterwards.
absl::StatusOr<std::vector<std::vector<digits::HostMatrix>>> TrainThroughService(const ServiceRun& job,
                                                                                 const digits::DigitsData& data);

// A run of the autoencoder by 4 workers whose method and statistics are those of a row of tests/bench/digits.py, by its
// name there, in f32. Aborts for a name that is not below.
digits::Run RunOfRow(absl::string_view row, int64_t steps);

// |x - y| / |y| over all layers together.
double RelativeDifference(const std::vector<digits::HostMatrix>& x, const std::vector<digits::HostMatrix>& y);

}  // namespace precondor::e2e
