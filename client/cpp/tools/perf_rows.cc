// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_rows.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_render.h"

namespace precondor {
namespace {

nlohmann::json Number(const std::optional<double>& value) {
  return value.has_value() ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

std::string Text(const std::optional<double>& value) {
  return value.has_value() ? absl::StrFormat("%.4g", *value) : "-";
}

}  // namespace

std::string RowsJson(const std::vector<PerfRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const PerfRow& row : rows) {
    list.push_back({{"name", row.name},
                    {"value", row.value},
                    {"unit", row.unit},
                    {"limit", Number(row.limit)},
                    {"ratio", Number(row.ratio)},
                    {"target", Number(row.target)},
                    {"pass", row.pass}});
  }
  return nlohmann::json{{"rows", list}}.dump(1) + "\n";
}

std::string RowsTable(const std::vector<PerfRow>& rows) {
  std::vector<std::vector<std::string>> cells = {{"NAME", "VALUE", "UNIT", "LIMIT", "RATIO", "TARGET", "PASS"}};
  for (const PerfRow& row : rows) {
    cells.push_back({row.name, Text(row.value), row.unit, Text(row.limit), Text(row.ratio), Text(row.target),
                     row.pass ? "yes" : "NO"});
  }
  return FormatTable(cells);
}

double Percentile(std::vector<double> samples, double fraction) {
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(fraction * static_cast<double>(samples.size()));
  return samples[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(samples.size()))) - 1];
}

}  // namespace precondor
