// SPDX-License-Identifier: Apache-2.0
// A small job around one layer: the shard's real LayerMachine, its journal, and ranks as docs/develop/protocol.md has
// them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/layer/layer_machine.h"

namespace precondor::explore {

// The events that may happen, and how often.
struct WorldLimits {
  std::string name = {};
  ExchangeMode exchange = ExchangeMode::kDirect;
  int32_t ranks = 2;
  uint64_t steps = 2;
  uint64_t window = 2;
  int shard_crashes = 0;         // the shard's process is killed, and comes back from its journal
  bool loses_log = false;        // its machine crashes as well: any end of each of its logs may be lost
  int rank_crashes = 0;          // a rank's process is killed; another one begins at its last checkpoint
  bool splits_requests = false;  // others may come between a contribution and its request for the answer
  int broken_streams = 0;        // with what was on its way to the rank
  bool learns = false;           // the method learns from gradients, and takes no statistics
  bool logs_gradients = true;    // of such a method
};

// A planted bug, which the exploration has to find: a rank sends no RESUME, nothing of what it keeps, or does not say
// where it begins; a shard that comes back does not know where ranks began, or has no record of updates. A gradient's
// record follows its answer.
enum class PlantedBug : uint8_t {
  kNone,
  kForgetsRank,
  kForgetsKept,
  kForgetsToBegin,
  kForgetsBegin,
  kLosesUpdate,
  kAnswersFirst
};

struct Item {
  enum class Kind : uint8_t { kStatistics, kGradient, kResume, kFetch, kBegin };
  Kind kind = Kind::kStatistics;
  uint64_t step = 0;
  uint64_t version = 0;           // of a RESUME
  int64_t place = 0;              // in the order of sending
  bool already_answered = false;  // sent again for the others' sake
  bool counted_before = false;    // acknowledged, in an earlier epoch or by an earlier shard generation
  bool operator==(const Item&) const = default;
};

// The answer to a rank: factors are the steps whose statistics they have, or whose gradients they have taken in, in
// order.
struct Answer {
  Decision decision = Decision::kIdentity;
  uint64_t version = 0;
  std::vector<uint8_t> factors = {};
  bool operator==(const Answer&) const = default;
};

struct Reply {
  Item item = {};
  bool acknowledged = false;
  ErrorReason refused = ErrorReason::kUnspecified;  // unless acknowledged or answered
  bool data_loss = false;
  std::optional<Answer> answer = {};
};

struct Rank {
  uint64_t step = 0;   // that it works on
  bool begun = false;  // its items are in `items`
  bool fetched = false;
  uint64_t checkpoint = 0;
  uint64_t epoch = 1;
  uint8_t stream = 0;
  bool connected = false;
  uint8_t shard_life = 0;  // that it last met; 0: none
  int64_t next_place = 0;
  std::vector<Item> queue = {};       // to be sent, by place
  std::vector<Item> sent = {};        // not answered
  std::vector<Item> kept = {};        // answered, and may be needed again
  std::optional<Item> retained = {};  // statistics that were acknowledged, of a step that may not have been sealed
  std::optional<std::pair<uint64_t, uint64_t>> last_answer = {};  // step, version
  std::vector<uint8_t> factors = {};                              // where workers hold them
  std::vector<Reply> replies = {};                                // on their way
};

struct Record {
  bool is_plan = false;
  uint64_t step = 0;
  uint64_t rollback_epoch = 0;
  bool empty = false;  // an update without contributions
  Plan plan = {};
};

// In the log of gradients.
struct GradientEntry {
  uint64_t step = 0;
  uint64_t rollback_epoch = 0;
  uint64_t version = 0;  // of the factors that have not taken it in
};

// A contribution has arrived, and is about to request the answer.
struct Request {
  uint8_t rank = 0;
  uint8_t stream = 0;
  ContributionKey key = {};
  Item item = {};
};

// And waits for it.
struct Waiting {
  uint8_t rank = 0;
  uint8_t stream = 0;
  Item item = {};
};

// A value. `LayerRules` and the spec behind it are the explorer's.
struct LayerWorld {
  explicit LayerWorld(const LayerRules& rules) : machine(rules, 1, 0, {}) {}

  LayerMachine machine;
  std::vector<Effect> work;       // the worker's, yet to be carried out
  std::vector<Request> requests;  // in the order of arrival
  std::map<StepId, std::vector<Waiting>> waiting;
  std::map<StepId, Answer> made;
  std::vector<uint8_t> factors = {};  // as in Answer
  std::vector<Record> journal;
  std::vector<GradientEntry> gradients;
  bool appended = false;                   // the gradient of the ComputeAnswer that is next in `work`
  std::optional<GradientEntry> unwritten;  // PlantedBug::kAnswersFirst
  uint8_t shard_life = 1;
  uint64_t epoch = 1;
  uint64_t rollback_epoch = 0;
  uint64_t rollback_step = 0;
  std::vector<Rank> ranks;
  std::vector<uint64_t> first_steps;  // by rank, that its process began with
  int shard_crashes = 0, rank_crashes = 0, broken_streams = 0;
  int errors = 0;  // that ended a process
  struct Had {
    Answer answer;
    std::set<uint32_t> ranks;
  };
  std::map<std::pair<uint64_t, uint64_t>, Had> answers;  // by (rollback epoch, step): that ranks have had
  std::string violation;                                 // empty: none
};

// Something that can happen next.
struct Move {
  enum class Kind : uint8_t {
    kBegin,
    kConnect,
    kSend,
    kRequest,
    kReceive,
    kJoin,
    kWork,
    kBreak,
    kCrashRank,
    kCrashShard
  };
  Kind kind = Kind::kBegin;
  uint8_t rank = 0;       // kRequest: which one
  uint8_t records = 0;    // kCrashShard: that stay in the journal
  uint8_t gradients = 0;  // and in the log of gradients
  bool is_fault() const { return kind >= Kind::kBreak; }
};

class LayerExplorer {
 public:
  using Limits = WorldLimits;
  using Bug = PlantedBug;
  using World = LayerWorld;
  using Move = explore::Move;

  LayerExplorer(const WorldLimits& limits, PlantedBug bug);
  LayerWorld Start() const;
  std::vector<Move> MovesOf(const LayerWorld& world) const;
  // Names an invariant in `violation` if the move breaks one. `story`, if not null, gets a line for each thing done.
  void Do(const Move& move, LayerWorld& world, std::vector<std::string>* story) const;
  bool IsDone(const LayerWorld& world) const;
  uint64_t Fingerprint(const LayerWorld& world) const;

 private:
  bool SendsGradient(uint32_t rank) const { return rules_.SendsGradient(rank); }
  bool MaySend(const LayerWorld& world, const Item& item) const;
  void GoOn(LayerWorld& world) const;
  bool MayGoOn(const LayerWorld& world, uint32_t rank) const;
  void Begin(LayerWorld& world, uint32_t rank) const;
  void Connect(LayerWorld& world, uint32_t rank) const;
  void Send(LayerWorld& world, uint32_t rank) const;
  void Receive(LayerWorld& world, uint32_t rank) const;
  void Refused(LayerWorld& world, uint32_t rank, const Reply& reply) const;
  void Answered(LayerWorld& world, uint32_t rank, const Item& item, const Answer& answer) const;
  void Join(LayerWorld& world, uint32_t rank) const;
  void Restart(LayerWorld& world, uint32_t rank) const;
  // Ranks that have done all their steps begin again with the others: they hear of it from their trainers.
  void ReplaceFinished(LayerWorld& world, uint64_t first_step) const;
  void ReplaceRank(LayerWorld& world, uint32_t rank, uint64_t first_step) const;
  void CrashShard(LayerWorld& world, size_t records, size_t gradients) const;
  // Whether a shard that comes back lacks nothing that it has told.
  bool IsExact() const { return !limits_.loses_log && (limits_.logs_gradients || !limits_.learns); }
  // Invariants of a RESUME, by the machine's effects.
  void CheckResume(LayerWorld& world, const Item& item, const Effects& effects) const;
  void Feed(LayerWorld& world, const LayerEvent& event, uint32_t rank, const Item* item) const;
  void Ask(LayerWorld& world, uint8_t request) const;
  void Work(LayerWorld& world) const;
  void ApplyPending(LayerWorld& world) const;
  void Carry(LayerWorld& world, const Effect& effect) const;
  void Compute(LayerWorld& world, const ComputeAnswer& effect) const;
  bool LearnsFrom(const LayerWorld& world, const ComputeAnswer& effect) const;
  void Reply_(LayerWorld& world, uint8_t rank, uint8_t stream, Reply reply) const;
  void Tell(const std::string& line) const;

  const WorldLimits limits_;
  const PlantedBug bug_;
  SessionSpec spec_;
  LayerRules rules_;
  mutable std::vector<std::string>* story_ = nullptr;
};

}  // namespace precondor::explore
