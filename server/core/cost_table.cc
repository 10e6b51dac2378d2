// SPDX-License-Identifier: Apache-2.0
#include "server/core/cost_table.h"

#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace precondor {
namespace {

std::string ValueText(const OptionValue& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const double* number = std::get_if<double>(&value)) return absl::StrCat(*number);
  return std::get<std::string>(value);
}

}  // namespace

std::string MethodText(const MethodConfig& config) {
  // The options are a sorted map.
  return absl::StrCat(config.name, "{",
                      absl::StrJoin(config.options, ",",
                                    [](std::string* out, const auto& option) {
                                      absl::StrAppend(out, option.first, "=", ValueText(option.second));
                                    }),
                      "}");
}

size_t CostTable::Register(const std::string& method, int64_t d_out, int64_t d_in) {
  MutexLock lock(mu_);
  auto [entry, fresh] = index_.try_emplace(std::make_tuple(method, d_out, d_in), entries_.size());
  if (fresh) {
    entries_.emplace_back();
    entries_.back().cost = {.method = method, .d_out = d_out, .d_in = d_in};
  }
  return entry->second;
}

void CostTable::RecordUpdate(size_t entry, double seconds) {
  MutexLock lock(mu_);
  entries_[entry].seconds += seconds;
  ++entries_[entry].updates;
}

void CostTable::RecordPrecondition(size_t entry, double seconds) {
  MutexLock lock(mu_);
  entries_[entry].seconds += seconds;
  ++entries_[entry].preconditions;
}

void CostTable::RecordDeferred(size_t entry, double seconds) {
  MutexLock lock(mu_);
  entries_[entry].seconds += seconds;
}

std::vector<MeasuredCost> CostTable::Snapshot() const {
  MutexLock lock(mu_);
  std::vector<MeasuredCost> costs;
  for (const Entry& entry : entries_) {
    const uint64_t steps = entry.preconditions > 0 ? entry.preconditions : entry.updates;
    if (steps == 0) continue;
    costs.push_back(entry.cost);
    costs.back().seconds_per_step = entry.seconds / static_cast<double>(steps);
  }
  return costs;
}

}  // namespace precondor
