// SPDX-License-Identifier: Apache-2.0
// What a coordinator is asked and answers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/shard/shard_control.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

struct Directive {
  uint64_t lease_through_step = 0;
  std::vector<ModeInterval> modes;
  uint64_t epoch = 0;
  uint64_t rollback_epoch = 0;  // the last one with which the job rolled back; 0: none
  uint64_t resume_step = 0;     // to which it rolled back
  uint64_t snapshot_at = 0;     // the step as of which the last snapshot is taken; 0: none
  uint64_t snapshot_number = 0;
};

struct ShardAssignment {
  std::string address;
  std::vector<uint32_t> layers;
};

struct OpenResult {
  uint64_t session_id = 0;
  bool created = false;
  SessionSpec spec;
  std::string secret;  // see SessionAccess
};

struct JoinResult {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  bool active = false;
  std::vector<ShardAssignment> shard_map;
  Directive directive;
  SessionSpec spec;
  std::string secret;  // see SessionAccess
};

struct StepReport {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t step = 0;
  double loss = 0;
  uint64_t samples = 1;
  bool finite = true;
  double learning_rate = 0;
};

struct CoordinatorSessionSummary {
  uint64_t session_id = 0;
  SessionSpec spec;
  uint64_t epoch = 0;
  uint32_t joined = 0;
  uint64_t last_step = 0;
  std::map<std::string, uint64_t> shard_steps;  // the greatest that each shard had begun when it was last asked
  Mode mode = Mode::kSecondOrder;
  double loss = 0;
  std::vector<ShardAssignment> shard_map;
  FallbackDecision decision;  // the last one, with its inputs
  std::vector<ModeInterval> modes;
  std::optional<Mode> forced;  // by an operator
  std::vector<SessionSnapshot> snapshots;
};

// A session in quarantine, put together from what the shards have of it; see ShardControl::Quarantine.
struct QuarantineSummary {
  SessionInstall install;  // of the latest epoch; its layers are all that some shard has
  uint64_t last_step = 0;  // the greatest
  absl::Time since;        // the latest, by the shards' wall clocks
  // One entry for each shard of the coordinator. A layer that two shards have is with the one of the later epoch.
  std::vector<PlacedLayers> placement;
};

}  // namespace precondor
