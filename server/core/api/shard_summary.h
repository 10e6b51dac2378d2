// SPDX-License-Identifier: Apache-2.0
// Summaries of a shard's sessions and layers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// Counters and factor state of one layer, for AdminService.GetLayerStats.
struct LayerStats {
  uint32_t layer = 0;
  std::string name;
  uint64_t factor_version = 0;
  std::string input_representation, output_representation;
  int64_t input_rank = 0, output_rank = 0;
  double input_damping = 0, output_damping = 0;
  int64_t failed_decompositions = 0, factor_resets = 0;
  int64_t state_bytes = 0;
  uint64_t accepted = 0, duplicates = 0, rejected = 0;
  uint64_t preconditioned = 0, identity = 0, skipped = 0;
  uint64_t last_sealed_step = 0;
  double update_seconds = 0, precondition_seconds = 0;  // means per operation
};

struct ShardSessionSummary {
  uint64_t session_id = 0;
  SessionSpec spec;
  uint64_t epoch = 0;
  uint32_t joined = 0;
  uint64_t last_step = 0;
  Mode mode = Mode::kSecondOrder;  // mode of last_step
  int64_t reserved_bytes = 0;
  uint64_t updates_lost = 0;  // since the session has been in this process; see LayerDriver::Resume
  // Since when the journal lacks gradients of the session; see ShardJournal::LacksGradientsSince.
  std::optional<absl::Time> lacks_gradients_since;
  std::vector<uint32_t> layers;         // that the shard owns, in ascending order
  std::vector<uint32_t> lagging_ranks;  // in ascending order; see ShardSession::ReportStragglers
};

}  // namespace precondor
