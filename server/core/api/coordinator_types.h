// SPDX-License-Identifier: Apache-2.0
// Requests to and answers of a coordinator.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/shard_control.h"
#include "server/policy/fallback.h"

namespace precondor {

struct Directive {
  uint64_t lease_through_step = 0;
  std::vector<ModeInterval> modes;
  uint64_t epoch = 0;
  uint64_t rollback_epoch = 0;  // last epoch with which the job rolled back; 0: none
  uint64_t resume_step = 0;     // step of that rollback
  uint64_t snapshot_at = 0;     // step of the last snapshot; 0: none
  uint64_t snapshot_number = 0;
};

struct ShardAssignment {
  std::string address;
  std::vector<uint32_t> layers;
};

struct OpenResult {
  uint64_t session_id = 0;
  bool created = false;  // by this call
  bool unused = false;   // see SessionSnapshots::IsUnused
  SessionSpec spec;
  std::string secret;  // see SessionAccess
};

struct JoinResult {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  bool active = false;
  std::vector<uint32_t> missing_ranks;  // that have not joined, ascending
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
  absl::Duration ago = absl::ZeroDuration();  // from the step's end to the report
};

struct CoordinatorSessionSummary {
  uint64_t session_id = 0;
  SessionSpec spec;
  uint64_t epoch = 0;
  uint32_t joined = 0;
  uint64_t last_step = 0;
  std::map<std::string, uint64_t> shard_steps;  // greatest step begun on each shard, by address, when last asked
  Mode mode = Mode::kSecondOrder;
  double loss = 0;
  std::vector<ShardAssignment> shard_map;
  FallbackDecision decision;  // the last one
  std::vector<ModeInterval> modes;
  std::vector<SnapshotEntry> snapshots;
};

struct RestoreResult {
  std::string secret;  // see SessionAccess
  CoordinatorSessionSummary session;
};

}  // namespace precondor
