// SPDX-License-Identifier: Apache-2.0
// The rows of precondor-perf's report.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace precondor {

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

}  // namespace precondor
