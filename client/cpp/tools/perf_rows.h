// SPDX-License-Identifier: Apache-2.0
// What precondor-perf reports.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace precondor {

struct PerfRow {
  std::string name;
  double value = 0;
  std::string unit;
  std::optional<double> limit = std::nullopt;   // what the machine, or the computation, allows
  std::optional<double> ratio = std::nullopt;   // of value and limit, as the name says
  std::optional<double> target = std::nullopt;  // for the value
  bool pass = true;
};

std::string RowsJson(const std::vector<PerfRow>& rows);
// A heading, then a line for each row; what a row does not have is empty.
std::string RowsCsv(const std::vector<PerfRow>& rows);
std::string RowsTable(const std::vector<PerfRow>& rows);

// The value below which a part `fraction` of the samples lies (nearest rank); samples not empty.
double Percentile(std::vector<double> samples, double fraction);

}  // namespace precondor
