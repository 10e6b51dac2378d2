// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/oracle.h"

#include <cmath>

#include "tests/sim/sim_random.h"

namespace precondor::sim {

std::pair<int64_t, int64_t> OwnRows(const SessionSpec& spec, uint32_t layer, uint32_t rank) {
  const int64_t rows = spec.layers[layer].d_out;
  return {rows * rank / spec.world_size, rows * (rank + 1) / spec.world_size};
}

Part Oracle::PartOf(ContributionKind kind, uint64_t step, uint32_t layer, uint32_t rank, uint64_t incarnation) const {
  if (repeatable_) incarnation = 0;
  Random random(seed_ ^ Mix(step ^ Mix(layer ^ Mix(rank ^ Mix(incarnation ^ Mix(static_cast<uint64_t>(kind)))))));
  Part part;
  part.abstain = random.Chance(trouble_);
  part.broken = !part.abstain && random.Chance(trouble_);
  part.samples = 1 + random.Below(7);
  const LayerSpec& shape = spec_.layers[layer];
  int64_t size = kind == ContributionKind::kGradient ? shape.d_out * shape.d_in
                                                     : VectorsPerWorker(spec_, 0) * (shape.d_in + shape.d_out);
  if (kind == ContributionKind::kGradient && spec_.exchange == ExchangeMode::kSharded) {
    const auto [begin, end] = OwnRows(spec_, layer, rank);
    size = (end - begin) * shape.d_in;
    part.broken = part.broken && size > 0;
  }
  for (int64_t i = 0; i < size; ++i) {
    part.values.push_back(static_cast<float>(random.Below(2'000'001)) * 1e-3f - 1e3f);
  }
  if (part.broken) part.values[random.Below(part.values.size())] = std::nanf("");
  return part;
}

std::optional<std::vector<float>> Oracle::Average(uint64_t step, uint32_t layer, const Contributors& who) const {
  std::vector<double> sum;
  std::vector<float> joined;
  double total = 0;
  for (const auto& [rank, incarnation] : who) {
    const Part part = PartOf(ContributionKind::kGradient, step, layer, rank, incarnation);
    if (part.abstain || part.broken) return std::nullopt;
    if (spec_.exchange == ExchangeMode::kSharded) {
      joined.insert(joined.end(), part.values.begin(), part.values.end());
      continue;
    }
    sum.resize(part.values.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += static_cast<double>(part.samples) * static_cast<double>(part.values[i]);
    }
    total += static_cast<double>(part.samples);
  }
  if (spec_.exchange == ExchangeMode::kSharded) return joined;
  std::vector<float> average;
  for (double value : sum) average.push_back(static_cast<float>(value / total));
  return average;
}

std::optional<Stacked> Oracle::Update(uint64_t step, uint32_t layer, const Contributors& who) const {
  std::vector<Part> parts;
  double total = 0;
  for (const auto& [rank, incarnation] : who) {
    Part part = PartOf(ContributionKind::kStatistics, step, layer, rank, incarnation);
    if (part.abstain || part.broken) continue;
    total += static_cast<double>(part.samples);
    parts.push_back(std::move(part));
  }
  if (parts.empty()) return std::nullopt;
  const size_t split = VectorsPerWorker(spec_, 0) * spec_.layers[layer].d_in;
  Stacked stacked;
  for (const Part& part : parts) {
    const double share = static_cast<double>(parts.size()) * static_cast<double>(part.samples) / total;
    const float scale = static_cast<float>(std::sqrt(share));
    for (size_t i = 0; i < part.values.size(); ++i) {
      (i < split ? stacked.a : stacked.g).push_back(part.values[i] * scale);
    }
  }
  return stacked;
}

}  // namespace precondor::sim
