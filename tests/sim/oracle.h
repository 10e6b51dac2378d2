// SPDX-License-Identifier: Apache-2.0
// What every contribution of a run is, and what must come of it: written from the definitions, in double precision,
// knowing nothing of core but the rounding to f32 at the end.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/core/contribution.h"

namespace precondor::sim {

// A rank's part of one (step, layer): what it sends, the same each time it is asked.
struct Part {
  bool abstain = false;
  bool broken = false;  // holds a NaN
  uint64_t samples = 1;
  std::vector<float> values;  // statistics: a [q, d_in], then g [q, d_out]; gradient [d_out, d_in]
};

class Oracle {
 public:
  Oracle(uint64_t seed, SessionSpec spec, double trouble) : seed_(seed), spec_(std::move(spec)), trouble_(trouble) {}

  Part PartOf(ContributionKind kind, uint64_t step, uint32_t layer, uint32_t rank) const;

  // The average gradient, or nullopt when somebody has none.
  std::optional<std::vector<float>> Average(uint64_t step, uint32_t layer) const;

  struct Stacked {
    std::vector<float> a;
    std::vector<float> g;
    bool operator==(const Stacked&) const = default;
  };
  // The vectors of one factor update, or nullopt when nobody has any.
  std::optional<Stacked> Update(uint64_t step, uint32_t layer) const;

 private:
  const uint64_t seed_;
  const SessionSpec spec_;
  const double trouble_;  // how often a rank has nothing, or nonsense
};

}  // namespace precondor::sim
