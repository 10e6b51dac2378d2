// SPDX-License-Identifier: Apache-2.0
#include "precondor/layer_rules.h"

#include <algorithm>
#include <memory>
#include <re2/re2.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

using Patterns = std::vector<std::unique_ptr<RE2>>;  // by rule; null matches any name

absl::StatusOr<Patterns> Compile(absl::Span<const LayerRule> rules) {
  Patterns patterns;
  for (size_t i = 0; i < rules.size(); ++i) {
    patterns.push_back(nullptr);
    if (rules[i].name_pattern.empty()) continue;
    patterns.back() = std::make_unique<RE2>(rules[i].name_pattern, RE2::Quiet);
    if (!patterns.back()->ok()) {
      return absl::InvalidArgumentError(absl::StrCat("rules[", i,
                                                     "].name_pattern: expected a regular expression, got \"",
                                                     rules[i].name_pattern, "\": ", patterns.back()->error()));
    }
  }
  return patterns;
}

bool Matches(const LayerRule& rule, const RE2* pattern, const ModelLayer& layer) {
  const int64_t dim = std::max(layer.spec.d_out, layer.spec.d_in);
  return (pattern == nullptr || RE2::FullMatch(layer.spec.name, *pattern)) &&
         (rule.kind.empty() || rule.kind == layer.kind) && dim >= rule.min_dim && dim <= rule.max_dim;
}

// Returns the rule for a layer that no given rule matches.
LayerRule DefaultRule(const ModelLayer& layer) {
  LayerRule rule;
  rule.precondition = layer.kind != "Embedding" && layer.spec.d_out > 1 && layer.spec.d_in > 1;
  return rule;
}

void AddException(const SessionSpec& spec, const LayerRule& rule, uint32_t place,
                  std::vector<LayerMethod>& exceptions) {
  const MethodConfig& method = rule.method.has_value() ? *rule.method : spec.method;
  const StatisticsKind statistics = rule.statistics.value_or(spec.statistics);
  if (method == spec.method && statistics == spec.statistics) return;
  const auto found = absl::c_find_if(
      exceptions, [&](const LayerMethod& entry) { return entry.method == method && entry.statistics == statistics; });
  LayerMethod& entry = found != exceptions.end() ? *found : exceptions.emplace_back();
  entry.method = method;
  entry.statistics = statistics;
  entry.layers.push_back(place);
}

}  // namespace

absl::StatusOr<ChosenLayers> ChooseLayers(const SessionSpec& spec, absl::Span<const ModelLayer> model,
                                          absl::Span<const LayerRule> rules) {
  const absl::StatusOr<Patterns> patterns = Compile(rules);
  if (!patterns.ok()) return patterns.status();
  ChosenLayers chosen;
  for (const ModelLayer& layer : model) {
    LayerRule rule = DefaultRule(layer);
    for (size_t i = 0; i < rules.size(); ++i) {
      if (!Matches(rules[i], (*patterns)[i].get(), layer)) continue;
      rule = rules[i];
      break;
    }
    if (!rule.precondition) {
      chosen.place.push_back(std::nullopt);
      continue;
    }
    const auto place = static_cast<uint32_t>(chosen.layers.size());
    chosen.place.push_back(place);
    chosen.layers.push_back(layer.spec);
    AddException(spec, rule, place, chosen.layer_methods);
  }
  return chosen;
}

}  // namespace precondor
