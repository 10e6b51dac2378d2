// SPDX-License-Identifier: Apache-2.0
// Coordinators and shards, without layers: each coordinator's real CoordinatorState, Reconcile and sessions, and shards
// that hold sessions behind the real FencingGate. The operations are those of coordinator_{opening,members,shards}.cc,
// cut where they wait: for a shard or for the journal. Worlds lack fences of epochs, factors and snapshots.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/core/api/shard_control.h"
#include "server/core/coordinator/coordinator_state.h"
#include "server/core/coordinator/reconcile.h"

namespace precondor::explore {

// The events that may happen, and how often.
struct CoordinatorLimits {
  std::string name = {};
  size_t shards = 1;
  int opens = 1, closes = 1, joins = 1;  // beside the session that is open at first
  int late_calls = 0;                    // the coordinator gives a call up, which arrives later or never
  int failed_writes = 0;                 // of the journal; the record may be there all the same
  bool takes_over = false;               // another coordinator begins to lead, and the first does not know it
  bool loses_journal = false;            // and begins on an empty journal
};

// A planted bug, which the exploration has to find: shards admit every coordinator; a coordinator forgets a session
// that it has given up; it removes a session that it does not know; it tells shards to remove a session before it
// writes that.
enum class CoordinatorBug : uint8_t { kNone, kNoFence, kForgetsGivenUp, kRemovesUnknown, kRemovesFirst };

// A coordinator's call to a shard.
struct ShardCall {
  enum class Kind : uint8_t { kDescribe, kInstall, kRemove, kQuarantine };
  Kind kind = Kind::kDescribe;
  uint8_t coordinator = 0;
  uint8_t operation = 0;
  bool awaited = true;  // the coordinator has not given it up
  uint8_t shard = 0;
  uint64_t session_id = 0;
  uint64_t epoch = 0;   // kInstall
  uint32_t joined = 0;  // kInstall
  auto operator<=>(const ShardCall&) const = default;
};

struct ShardAnswer {
  bool ok = false;
  bool stale_leader = false;
  ShardDescription description = {};  // kDescribe
};

enum class OperationKind : uint8_t { kIdle, kOpen, kGiveUp, kClose, kJoin, kReconcile };

// An operation of a coordinator, which waits for an answer or is about to write a record.
struct Operation {
  OperationKind kind = OperationKind::kIdle;
  uint64_t session_id = 0;
  size_t at = 0;                                        // step that it waits for
  std::shared_ptr<const CoordinatorRecord> write = {};  // null: it writes nothing now
  std::optional<ShardAnswer> answer = {};
  std::vector<CoordinatorAction> actions = {};  // kReconcile: to be carried out, the first one now
  bool described = false;                       // kReconcile: `actions` are those of the shard `at`
  size_t told = 0;                              // kReconcile: shards that an action has told the members
};

struct CoordinatorProcess {
  CoordinatorState state = {};
  uint64_t token = 0;
  bool replaced = false;  // as a shard has told it
  // A caller's operation, and Reconcile.
  Operation operations[2] = {};
};

struct ModelShard {
  std::map<uint64_t, HeldSession> held = {};
  std::map<uint64_t, HeldSession> quarantine = {};
  uint64_t token = 0;
};

// A value.
struct CoordinatorWorld {
  std::vector<CoordinatorProcess> coordinators = {};
  std::vector<ModelShard> shards = {};
  std::vector<ShardCall> calls = {};  // on their way
  std::vector<std::shared_ptr<const CoordinatorRecord>> journal = {};
  std::set<uint64_t> announced = {};  // sessions that a caller was told of
  std::set<uint64_t> closed = {};     // sessions with a ClosingRecord
  int opens = 0, closes = 0, joins = 0, late_calls = 0, failed_writes = 0;
  std::string violation = {};  // empty: none
};

struct CoordinatorMove {
  enum class Kind : uint8_t {
    kOpen,
    kClose,
    kJoin,
    kReconcile,
    kWrite,
    kArrive,
    kReceive,
    kFailWrite,
    kGiveUp,
    kLose,
    kTakeOver
  };
  Kind kind = Kind::kOpen;
  uint8_t coordinator = 0;
  uint8_t index = 0;        // of the operation, or of the call
  uint64_t session_id = 0;  // kClose, kJoin
  bool lands = false;       // kFailWrite: the record is there all the same
  bool is_fault() const { return kind >= Kind::kFailWrite; }
};

class CoordinatorExplorer {
 public:
  using Limits = CoordinatorLimits;
  using Bug = CoordinatorBug;
  using World = CoordinatorWorld;
  using Move = CoordinatorMove;

  CoordinatorExplorer(const CoordinatorLimits& limits, CoordinatorBug bug) : limits_(limits), bug_(bug) {}
  CoordinatorWorld Start() const;
  std::vector<CoordinatorMove> MovesOf(const CoordinatorWorld& world) const;
  // Names an invariant in `violation` if the move breaks one. `story`, if not null, gets a line for each thing done.
  void Do(const CoordinatorMove& move, CoordinatorWorld& world, std::vector<std::string>* story) const;
  // Whether nothing is on its way, and the shards hold what the newest coordinator knows and nothing else.
  bool IsDone(const CoordinatorWorld& world) const;
  uint64_t Fingerprint(const CoordinatorWorld& world) const;

 private:
  // Returns what the shard answers.
  ShardAnswer Serve(CoordinatorWorld& world, const ShardCall& call) const;

  const CoordinatorLimits limits_;
  const CoordinatorBug bug_;
};

}  // namespace precondor::explore
