// SPDX-License-Identifier: Apache-2.0
// Every contribution of a run, and the results that must come of them: written from the definitions, in double
// precision, knowing nothing of core but the rounding to f32 at the end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "server/core/api/contribution.h"
#include "tests/sim/sim_method.h"

namespace precondor::sim {

// A process's part of one (step, layer): what it sends, the same each time it is asked. Another process in the same
// rank has something else to send, as trainers that are not deterministic do.
struct Part {
  bool abstain = false;
  bool broken = false;  // holds a NaN
  uint64_t samples = 1;
  std::vector<float> values;  // statistics: a [q, d_in], then g [q, d_out]; gradient [d_out, d_in], or OwnRows of it
};

// The contributors: incarnation by rank.
using Contributors = std::map<uint32_t, uint64_t>;

// The rows of a gradient that a rank has in SHARDED: first and behind the last.
std::pair<int64_t, int64_t> OwnRows(const SessionSpec& spec, uint32_t layer, uint32_t rank);

class Oracle {
 public:
  Oracle(uint64_t seed, SessionSpec spec, double trouble, bool repeatable)
      : seed_(seed), spec_(std::move(spec)), trouble_(trouble), repeatable_(repeatable) {}

  Part PartOf(ContributionKind kind, uint64_t step, uint32_t layer, uint32_t rank, uint64_t incarnation) const;

  // The average gradient, or of SHARDED the joined one; nullopt when one of them has none.
  std::optional<std::vector<float>> Average(uint64_t step, uint32_t layer, const Contributors& who) const;
  // The vectors of one factor update, or nullopt when none of them has any.
  std::optional<Stacked> Update(uint64_t step, uint32_t layer, const Contributors& who) const;

 private:
  const uint64_t seed_;
  const SessionSpec spec_;
  const double trouble_;   // how often a process has nothing, or nonsense
  const bool repeatable_;  // trainers are deterministic: every process of a rank has the same to say
};

}  // namespace precondor::sim
