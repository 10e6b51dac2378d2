// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/cost_table.h"

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

std::shared_ptr<CostTable::Entry> CostTable::Register(const std::string& method, int64_t d_out, int64_t d_in) {
  MutexLock lock(mu_);
  std::shared_ptr<Entry>& entry = entries_[std::make_tuple(method, d_out, d_in)];
  if (entry == nullptr) {
    entry = std::make_shared<Entry>();
    entry->cost = {.method = method, .d_out = d_out, .d_in = d_in};
  }
  entry->registered = ++registrations_;
  std::shared_ptr<Entry> registered = entry;
  if (entries_.size() > kMostEntries) {
    entries_.erase(std::min_element(entries_.begin(), entries_.end(), [](const auto& x, const auto& y) {
      return x.second->registered < y.second->registered;
    }));
  }
  return registered;
}

void CostTable::RecordUpdate(Entry& entry, double seconds) {
  MutexLock lock(mu_);
  entry.seconds += seconds;
  ++entry.updates;
}

void CostTable::RecordPrecondition(Entry& entry, double seconds) {
  MutexLock lock(mu_);
  entry.seconds += seconds;
  ++entry.preconditions;
}

void CostTable::RecordDeferred(Entry& entry, double seconds) {
  MutexLock lock(mu_);
  entry.seconds += seconds;
}

std::vector<MeasuredCost> CostTable::Snapshot() const {
  MutexLock lock(mu_);
  std::vector<MeasuredCost> costs;
  for (const auto& [key, entry] : entries_) {
    const uint64_t steps = entry->preconditions > 0 ? entry->preconditions : entry->updates;
    if (steps == 0) continue;
    costs.push_back(entry->cost);
    costs.back().seconds_per_step = entry->seconds / static_cast<double>(steps);
  }
  return costs;
}

}  // namespace precondor
