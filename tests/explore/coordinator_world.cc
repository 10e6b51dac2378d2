// SPDX-License-Identifier: Apache-2.0
#include "tests/explore/coordinator_world.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/shard/fencing_gate.h"

namespace precondor::explore {
namespace {

using MoveKind = CoordinatorMove::Kind;
using CallKind = ShardCall::Kind;

constexpr uint64_t kLeaseSteps = 4;
constexpr uint64_t kFirstSession = 1;
constexpr uint8_t kCaller = 0, kReconciler = 1;  // operations of a coordinator
constexpr const char* kCallNames[] = {"Describe", "Install", "Remove", "Quarantine"};
constexpr const char* kActionNames[] = {"remove ending", "remove abandoned", "quarantine",   "hold factors", "install",
                                        "close",         "begin snapshot",   "ask for parts"};

std::vector<PlacedLayers> Places(size_t shards, bool with_layers) {
  std::vector<PlacedLayers> places;
  for (uint32_t s = 0; s < shards; ++s) {
    places.push_back({.shard = absl::StrCat("shard", s), .address = "", .layers = {}});
    if (with_layers) places.back().layers.push_back(s);
  }
  return places;
}

// A session of one rank, with a layer on each shard.
SessionRecord NewSession(uint64_t id, size_t shards) {
  SessionSpec spec;
  spec.name = absl::StrCat("job", id);
  return {.session_id = id,
          .spec = spec,
          .placement = Places(shards, /*with_layers=*/true),
          .membership = SessionMembers::First(spec),
          .lease = StepLeases::First(spec, kLeaseSteps)};
}

// Worlds share sessions: one that changes is copied first.
CoordinatorSession& Own(CoordinatorState& state, uint64_t id) {
  std::shared_ptr<CoordinatorSession>& session = state.open.at(id);
  session = std::make_shared<CoordinatorSession>(*session);
  return *session;
}

// One operation of one coordinator. It goes on until it waits for an answer, or for a record to be written.
class Actor {
 public:
  Actor(CoordinatorWorld& world, CoordinatorBug bug, uint8_t coordinator, uint8_t index)
      : world_(world),
        bug_(bug),
        coordinator_(coordinator),
        index_(index),
        process_(world.coordinators[coordinator]),
        state_(process_.state),
        op_(process_.operations[index]) {}

  void Begin(OperationKind kind, uint64_t session_id) {
    op_ = {.kind = kind, .session_id = session_id};
    switch (kind) {
      case OperationKind::kIdle:
      case OperationKind::kGiveUp:
        return;
      case OperationKind::kOpen:
        op_.session_id = state_.BeginOpening({}, absl::FromUnixNanos(static_cast<int64_t>(process_.token) * 10));
        return Install(0, CoordinatorSession(NewSession(op_.session_id, shards()), kLeaseSteps));
      case OperationKind::kClose:
        if (bug_ == CoordinatorBug::kRemovesFirst) return Call(CallKind::kRemove, 0, session_id);
        return WriteRecord(ClosingRecord{.session_id = session_id});
      case OperationKind::kJoin: {
        const SessionMembers& members = state_.Find(session_id)->members();
        const uint64_t incarnation = members.membership().last_holders[0] + 1;
        return WriteRecord(
            MembershipRecord{.session_id = session_id, .membership = **members.PlanJoin(0, incarnation, 0)});
      }
      case OperationKind::kReconcile:
        return Call(CallKind::kDescribe, 0, 0);
    }
  }

  // The record that the operation writes is durable, or the write has failed.
  void Written(bool ok) {
    const CoordinatorRecord record = *std::exchange(op_.write, nullptr);
    if (ok && std::holds_alternative<MembershipRecord>(record)) Own(state_, op_.session_id).Adopt(record);
    Resume({.ok = ok});
  }
  // The event that the operation waits for has come.
  void Resume(const ShardAnswer& answer) {
    switch (op_.kind) {
      case OperationKind::kIdle:
        return;
      case OperationKind::kOpen:
        return ResumeOpen(answer.ok);
      case OperationKind::kGiveUp:
        if (++op_.at < shards()) return Call(CallKind::kRemove, op_.at, op_.session_id);
        return End();
      case OperationKind::kClose:
        return ResumeClose(answer.ok);
      case OperationKind::kJoin:
        return ResumeJoin(answer.ok);
      case OperationKind::kReconcile:
        return ResumeReconcile(answer);
    }
  }

 private:
  size_t shards() const { return world_.shards.size(); }
  void End() { op_ = {}; }
  void Call(CallKind kind, size_t shard, uint64_t session_id) {
    world_.calls.push_back({.kind = kind,
                            .coordinator = coordinator_,
                            .operation = index_,
                            .shard = static_cast<uint8_t>(shard),
                            .session_id = session_id});
  }
  void Install(size_t shard, const CoordinatorSession& session) {
    const SessionInstall install = MakeInstalls(session)[shard];
    Call(CallKind::kInstall, shard, install.session_id);
    world_.calls.back().epoch = install.epoch;
    world_.calls.back().joined = static_cast<uint32_t>(install.members.size());
  }
  void WriteRecord(CoordinatorRecord record) {
    op_.write = std::make_shared<const CoordinatorRecord>(std::move(record));
  }

  void ResumeOpen(bool ok) {
    const uint64_t id = op_.session_id;
    const auto session = std::make_shared<CoordinatorSession>(NewSession(id, shards()), kLeaseSteps);
    if (!ok) {
      state_.Abandon(id);
      if (bug_ == CoordinatorBug::kForgetsGivenUp) state_.abandoned.erase(id);
      op_ = {.kind = OperationKind::kGiveUp, .session_id = id};
      return Call(CallKind::kRemove, 0, id);
    }
    if (op_.at == shards()) {
      state_.Open(session);
      world_.announced.insert(id);
      return End();
    }
    if (++op_.at < shards()) return Install(op_.at, *session);
    WriteRecord(MakeRecord(*session));
  }

  // Step 0 writes the ClosingRecord, step s + 1 removes the session from shard s, and the last one writes the
  // CloseRecord.
  void ResumeClose(bool ok) {
    const uint64_t id = op_.session_id;
    if (op_.at == 0 && bug_ == CoordinatorBug::kRemovesFirst) return End();
    if (op_.at == 0 && !ok) return End();
    if (op_.at == 0) {
      state_.BeginEnding(id, shards());
    } else if (op_.at <= shards()) {
      NoteRemoved(id, op_.at - 1, ok);
    } else {
      if (ok) state_.Abandon(id);
      return End();
    }
    while (++op_.at <= shards()) {
      if (state_.MustRemove(id, op_.at - 1)) return Call(CallKind::kRemove, op_.at - 1, id);
    }
    if (!absl::c_linear_search(state_.RemovedEverywhere(), id)) return End();
    WriteRecord(CloseRecord{.session_id = id});
  }

  void ResumeJoin(bool ok) {
    if (!ok) return End();
    if (op_.at == shards()) {
      NoteTold(op_.session_id);
      return End();
    }
    Install(op_.at++, *state_.Find(op_.session_id));
  }

  void ResumeReconcile(const ShardAnswer& answer) {
    if (op_.described) {
      if (EndAction(answer.ok)) op_.actions.erase(op_.actions.begin());
    } else if (answer.ok) {
      for (const uint64_t id : OpenIds()) Own(state_, id);
      Observe(state_, op_.at, answer.description);
      op_.actions = ReconcileShard(state_, op_.at, answer.description);
    }
    op_.described = true;
    for (;;) {
      for (; !op_.actions.empty(); op_.actions.erase(op_.actions.begin())) {
        if (BeginAction(op_.actions.front())) return;
      }
      if (op_.at == shards()) return End();
      if (++op_.at < shards()) {
        op_.described = false;
        return Call(CallKind::kDescribe, op_.at, 0);
      }
      op_.actions = ReconcileSessions(state_, 0);
    }
  }

  // Returns whether the action waits for something.
  bool BeginAction(const CoordinatorAction& action) {
    const uint64_t id = action.session_id;
    op_.told = 0;
    switch (action.kind) {
      case ActionKind::kRemoveEnding:
        if (state_.MustRemove(id, action.shard)) Call(CallKind::kRemove, action.shard, id);
        return state_.MustRemove(id, action.shard);
      case ActionKind::kRemoveAbandoned:
        Call(CallKind::kRemove, action.shard, id);
        return true;
      case ActionKind::kQuarantine:
        Call(bug_ == CoordinatorBug::kRemovesUnknown ? CallKind::kRemove : CallKind::kQuarantine, action.shard, id);
        return true;
      case ActionKind::kInstall: {
        // The product would wait for the session's lock here. In this world the next Reconcile does it.
        if (state_.Find(id) == nullptr || IsLocked(id)) return false;
        const CoordinatorSession& session = *state_.Find(id);
        Install(session.members().shards_told() ? action.shard : 0, session);
        return true;
      }
      case ActionKind::kClose:
        WriteRecord(CloseRecord{.session_id = id});
        return true;
      case ActionKind::kBeginSnapshot:
      case ActionKind::kAskForParts:
        world_.violation = absl::StrCat("an action that no session of this world needs: ", action.name);
    }
    return false;
  }

  // Returns whether the action is over.
  bool EndAction(bool ok) {
    const CoordinatorAction action = op_.actions.front();
    if (action.kind == ActionKind::kRemoveEnding) NoteRemoved(action.session_id, action.shard, ok);
    if (action.kind == ActionKind::kClose && ok) state_.Abandon(action.session_id);
    if (action.kind != ActionKind::kInstall || !ok) return true;
    const CoordinatorSession& session = *state_.Find(action.session_id);
    if (session.members().shards_told()) return true;
    if (++op_.told == shards()) {
      NoteTold(action.session_id);
      return true;
    }
    Install(op_.told, session);
    return false;
  }

  void NoteRemoved(uint64_t id, size_t shard, bool ok) {
    const auto ends = state_.ending.find(id);
    if (ok && ends != state_.ending.end()) ends->second.removed[shard] = true;
  }
  void NoteTold(uint64_t id) {
    CoordinatorSession& session = Own(state_, id);
    session.NoteShardsTold(session.members().membership());
  }
  std::vector<uint64_t> OpenIds() const {
    std::vector<uint64_t> ids;
    for (const auto& [id, session] : state_.open) ids.push_back(id);
    return ids;
  }
  // Whether the caller's operation has the session's lock.
  bool IsLocked(uint64_t id) const {
    const Operation& caller = process_.operations[kCaller];
    return caller.session_id == id && (caller.kind != OperationKind::kClose || caller.at == 0);
  }

  CoordinatorWorld& world_;
  const CoordinatorBug bug_;
  const uint8_t coordinator_;
  const uint8_t index_;
  CoordinatorProcess& process_;
  CoordinatorState& state_;
  Operation& op_;
};

// Whether the operation may begin for the session.
bool MayBegin(const CoordinatorProcess& process, uint64_t id) {
  const Operation& reconciler = process.operations[kReconciler];
  // It holds the session's lock.
  const bool installs = !reconciler.actions.empty() && reconciler.described &&
                        reconciler.actions[0].kind == ActionKind::kInstall && reconciler.actions[0].session_id == id;
  return process.operations[kCaller].kind == OperationKind::kIdle && !installs;
}

// Another coordinator begins to lead, with what is in the journal.
void Lead(CoordinatorWorld& world) {
  std::vector<CoordinatorRecord> records;
  for (const auto& record : world.journal) records.push_back(*record);
  CoordinatorProcess& process = world.coordinators.emplace_back();
  process.state = *RestoreState(records, Places(world.shards.size(), /*with_layers=*/false), kLeaseSteps);
  process.token = world.coordinators.size();
}

// Adds what a restart from the record would change.
void PutRecord(const CoordinatorRecord& record, std::vector<uint64_t>& all) {
  all.push_back(record.index());
  if (const auto* opened = std::get_if<SessionRecord>(&record)) all.push_back(opened->session_id);
  if (const auto* closing = std::get_if<ClosingRecord>(&record)) all.push_back(closing->session_id);
  if (const auto* closed = std::get_if<CloseRecord>(&record)) all.push_back(closed->session_id);
  if (const auto* members = std::get_if<MembershipRecord>(&record)) {
    all.insert(all.end(), {members->session_id, members->membership.epoch, members->membership.incarnations[0]});
  }
}

void PutHeld(const HeldSession& held, std::vector<uint64_t>& all) {
  all.insert(all.end(), {held.session_id, held.epoch, held.joined});
}

void PutState(const CoordinatorState& state, std::vector<uint64_t>& all) {
  for (const auto& [id, session] : state.open) {
    const SessionMembers& members = session->members();
    all.insert(all.end(), {id, members.epoch(), members.membership().incarnations[0], uint64_t{members.shards_told()}});
  }
  all.push_back(state.last_id);
  for (const auto& [id, counted] : state.counted) all.push_back(id);
  all.push_back(0);
  for (const auto& [id, ending] : state.ending) {
    all.push_back(id);
    for (const bool removed : ending.removed) all.push_back(removed);
  }
  all.push_back(0);
  all.insert(all.end(), state.abandoned.begin(), state.abandoned.end());
}

void PutOperation(const Operation& op, std::vector<uint64_t>& all) {
  all.insert(all.end(), {static_cast<uint64_t>(op.kind), op.session_id, op.at, uint64_t{op.described}, op.told,
                         uint64_t{op.write != nullptr}, uint64_t{op.answer.has_value()}, op.actions.size()});
  if (op.write != nullptr) PutRecord(*op.write, all);
  if (op.answer.has_value()) {
    all.insert(all.end(), {uint64_t{op.answer->ok}, uint64_t{op.answer->stale_leader}});
    for (const HeldSession& held : op.answer->description.sessions) PutHeld(held, all);
  }
  for (const CoordinatorAction& action : op.actions) {
    all.insert(all.end(), {static_cast<uint64_t>(action.kind), action.shard, action.session_id});
  }
}

}  // namespace

CoordinatorWorld CoordinatorExplorer::Start() const {
  CoordinatorWorld world;
  world.shards.resize(limits_.shards);
  world.journal.push_back(std::make_shared<const CoordinatorRecord>(NewSession(kFirstSession, limits_.shards)));
  Lead(world);
  CoordinatorSession& session = *world.coordinators[0].state.open.at(kFirstSession);
  session.NoteShardsTold(session.members().membership());
  for (ModelShard& shard : world.shards) {
    shard.held[kFirstSession] = {.session_id = kFirstSession, .name = session.spec.name, .epoch = 1};
    shard.token = 1;
  }
  world.announced.insert(kFirstSession);
  return world;
}

std::vector<CoordinatorMove> CoordinatorExplorer::MovesOf(const CoordinatorWorld& world) const {
  std::vector<CoordinatorMove> moves;
  for (uint8_t c = 0; c < world.coordinators.size(); ++c) {
    const CoordinatorProcess& process = world.coordinators[c];
    if (process.replaced) continue;
    const bool idle = process.operations[kCaller].kind == OperationKind::kIdle;
    if (idle && world.opens < limits_.opens) moves.push_back({.kind = MoveKind::kOpen, .coordinator = c});
    for (const auto& [id, session] : process.state.open) {
      if (!MayBegin(process, id)) continue;
      if (world.closes < limits_.closes) {
        moves.push_back({.kind = MoveKind::kClose, .coordinator = c, .session_id = id});
      }
      if (world.joins < limits_.joins) {
        moves.push_back({.kind = MoveKind::kJoin, .coordinator = c, .session_id = id});
      }
    }
    if (process.operations[kReconciler].kind == OperationKind::kIdle) {
      moves.push_back({.kind = MoveKind::kReconcile, .coordinator = c, .index = kReconciler});
    }
    for (const uint8_t index : {kCaller, kReconciler}) {
      const Operation& op = process.operations[index];
      if (op.answer.has_value()) moves.push_back({.kind = MoveKind::kReceive, .coordinator = c, .index = index});
      if (op.write == nullptr) continue;
      moves.push_back({.kind = MoveKind::kWrite, .coordinator = c, .index = index});
      if (world.failed_writes == limits_.failed_writes) continue;
      for (const bool lands : {false, true}) {
        moves.push_back({.kind = MoveKind::kFailWrite, .coordinator = c, .index = index, .lands = lands});
      }
    }
  }
  for (uint8_t i = 0; i < world.calls.size(); ++i) {
    if (i > 0 && world.calls[i] == world.calls[i - 1]) continue;
    moves.push_back({.kind = MoveKind::kArrive, .index = i});
    if (!world.calls[i].awaited) moves.push_back({.kind = MoveKind::kLose, .index = i});
    if (world.calls[i].awaited && world.late_calls < limits_.late_calls) {
      moves.push_back({.kind = MoveKind::kGiveUp, .index = i});
    }
  }
  if (limits_.takes_over && world.coordinators.size() == 1) moves.push_back({.kind = MoveKind::kTakeOver});
  return moves;
}

ShardAnswer CoordinatorExplorer::Serve(CoordinatorWorld& world, const ShardCall& call) const {
  static const RealClock clock;
  ModelShard& shard = world.shards[call.shard];
  if (bug_ != CoordinatorBug::kNoFence) {
    FencingGate gate(clock, [](uint64_t) { return absl::OkStatus(); });
    gate.Restore(shard.token);
    const absl::Status entered = gate.Enter(world.coordinators[call.coordinator].token).status();
    if (!entered.ok()) return {.stale_leader = GetErrorReason(entered) == ErrorReason::kStaleLeader};
    shard.token = gate.current();
  }
  const uint64_t id = call.session_id;
  const bool wanted = world.announced.contains(id) && !world.closed.contains(id);
  ShardAnswer answer{.ok = true};
  switch (call.kind) {
    case CallKind::kDescribe:
      for (const auto& [held_id, held] : shard.held) answer.description.sessions.push_back(held);
      break;
    case CallKind::kInstall: {
      if (auto kept = shard.quarantine.extract(id); !kept.empty()) shard.held.insert(std::move(kept));
      HeldSession& held = shard.held[id];
      if (call.epoch < held.epoch) return {};
      held = {.session_id = id,
              .name = absl::StrCat("job", id),
              .epoch = call.epoch,
              .joined = call.epoch > held.epoch ? call.joined : std::max(call.joined, held.joined)};
      break;
    }
    case CallKind::kRemove:
      if (wanted) world.violation = absl::StrCat("session ", id, " is open, and a shard removes it");
      shard.held.erase(id);
      shard.quarantine.erase(id);
      break;
    case CallKind::kQuarantine:
      if (wanted && !limits_.loses_journal) {
        world.violation = absl::StrCat("session ", id, " is open and in the journal, and a shard gives it up");
      }
      if (auto held = shard.held.extract(id); !held.empty()) shard.quarantine.insert(std::move(held));
      break;
  }
  return answer;
}

void CoordinatorExplorer::Do(const CoordinatorMove& move, CoordinatorWorld& world,
                             std::vector<std::string>* story) const {
  const auto tell = [&](const auto&... text) {
    if (story != nullptr) story->push_back(absl::StrCat(text...));
  };
  const auto actor = [&] { return Actor(world, bug_, move.coordinator, move.index); };
  switch (move.kind) {
    case MoveKind::kOpen:
      ++world.opens;
      actor().Begin(OperationKind::kOpen, 0);
      tell("coordinator ", move.coordinator, " opens a session");
      break;
    case MoveKind::kClose:
      ++world.closes;
      actor().Begin(OperationKind::kClose, move.session_id);
      tell("coordinator ", move.coordinator, " closes session ", move.session_id);
      break;
    case MoveKind::kJoin:
      ++world.joins;
      actor().Begin(OperationKind::kJoin, move.session_id);
      tell("coordinator ", move.coordinator, ": a worker takes the rank of session ", move.session_id);
      break;
    case MoveKind::kReconcile:
      actor().Begin(OperationKind::kReconcile, 0);
      tell("coordinator ", move.coordinator, " reconciles");
      break;
    case MoveKind::kWrite:
    case MoveKind::kFailWrite: {
      // Storage that elects leaders takes no record of an earlier one. With a lost journal, each has its own.
      const bool newest = move.coordinator + size_t{1} == world.coordinators.size();
      const bool ok = move.kind == MoveKind::kWrite && (newest || limits_.loses_journal);
      const auto record = world.coordinators[move.coordinator].operations[move.index].write;
      if (move.kind == MoveKind::kFailWrite) ++world.failed_writes;
      if (ok || (move.lands && newest)) {
        world.journal.push_back(record);
        if (const auto* closing = std::get_if<ClosingRecord>(record.get())) world.closed.insert(closing->session_id);
      }
      tell("coordinator ", move.coordinator, " writes record ", record->index(), ok ? "" : ": fails");
      actor().Written(ok);
      break;
    }
    case MoveKind::kReceive: {
      CoordinatorProcess& process = world.coordinators[move.coordinator];
      const ShardAnswer answer = *std::exchange(process.operations[move.index].answer, std::nullopt);
      tell("coordinator ", move.coordinator, " receives the answer: ",
           answer.ok             ? "done"
           : answer.stale_leader ? "another one leads"
                                 : "refused");
      if (!answer.stale_leader) {
        actor().Resume(answer);
        break;
      }
      process.replaced = true;
      for (Operation& op : process.operations) op = {};
      for (ShardCall& call : world.calls) call.awaited &= call.coordinator != move.coordinator;
      break;
    }
    case MoveKind::kArrive: {
      const ShardCall call = world.calls[move.index];
      world.calls.erase(world.calls.begin() + move.index);
      tell(kCallNames[static_cast<size_t>(call.kind)], "(", call.session_id, ", epoch ", call.epoch,
           ") of coordinator ", call.coordinator, " arrives at shard ", call.shard, call.awaited ? "" : ", late");
      ShardAnswer answer = Serve(world, call);
      if (call.awaited) world.coordinators[call.coordinator].operations[call.operation].answer = std::move(answer);
      break;
    }
    case MoveKind::kGiveUp: {
      ShardCall& call = world.calls[move.index];
      ++world.late_calls;
      call.awaited = false;
      tell("coordinator ", call.coordinator, " gives up ", kCallNames[static_cast<size_t>(call.kind)], "(",
           call.session_id, ") to shard ", call.shard);
      Actor(world, bug_, call.coordinator, call.operation).Resume({});
      break;
    }
    case MoveKind::kLose:
      tell("a call that was given up is lost");
      world.calls.erase(world.calls.begin() + move.index);
      break;
    case MoveKind::kTakeOver:
      if (limits_.loses_journal) world.journal.clear();
      Lead(world);
      tell("coordinator 1 takes over", limits_.loses_journal ? ", without the journal" : "");
      break;
  }
  std::sort(world.calls.begin(), world.calls.end());
  if (story == nullptr || move.kind == MoveKind::kArrive) return;
  for (const CoordinatorProcess& process : world.coordinators) {
    const std::vector<CoordinatorAction>& actions = process.operations[kReconciler].actions;
    if (actions.empty()) continue;
    tell("    next: ", kActionNames[static_cast<size_t>(actions[0].kind)], " ", actions[0].session_id);
  }
}

bool CoordinatorExplorer::IsDone(const CoordinatorWorld& world) const {
  const CoordinatorProcess& leader = world.coordinators.back();
  if (!world.calls.empty() || leader.replaced || !leader.state.ending.empty()) return false;
  for (const CoordinatorProcess& process : world.coordinators) {
    for (const Operation& op : process.operations) {
      if (op.kind != OperationKind::kIdle) return false;
    }
  }
  return absl::c_all_of(world.shards, [&](const ModelShard& shard) {
    // A coordinator that has seen a session end does not leave it in quarantine.
    if (shard.held.size() != leader.state.open.size() || (!limits_.takes_over && !shard.quarantine.empty()))
      return false;
    return absl::c_all_of(leader.state.open, [&](const auto& one) {
      const auto held = shard.held.find(one.first);
      return held != shard.held.end() && held->second.epoch == one.second->members().epoch() &&
             held->second.joined == one.second->members().joined();
    });
  });
}

uint64_t CoordinatorExplorer::Fingerprint(const CoordinatorWorld& world) const {
  std::vector<uint64_t> all;
  for (const CoordinatorProcess& process : world.coordinators) {
    all.push_back(process.replaced);
    if (process.replaced) continue;  // it does nothing any more
    PutState(process.state, all);
    for (const Operation& op : process.operations) PutOperation(op, all);
  }
  for (const ModelShard& shard : world.shards) {
    all.push_back(shard.token);
    for (const auto& [id, held] : shard.held) PutHeld(held, all);
    all.push_back(0);
    for (const auto& [id, held] : shard.quarantine) PutHeld(held, all);
    all.push_back(0);
  }
  for (const ShardCall& call : world.calls) {
    all.insert(all.end(), {static_cast<uint64_t>(call.kind), call.coordinator, call.operation, uint64_t{call.awaited},
                           call.shard, call.session_id, call.epoch, call.joined});
  }
  all.push_back(0);
  if (limits_.takes_over && !limits_.loses_journal && world.coordinators.size() == 1) {
    for (const auto& record : world.journal) PutRecord(*record, all);
  }
  all.insert(all.end(), world.announced.begin(), world.announced.end());
  all.push_back(0);
  all.insert(all.end(), world.closed.begin(), world.closed.end());
  for (const int count : {world.opens, world.closes, world.joins, world.late_calls, world.failed_writes}) {
    all.push_back(static_cast<uint64_t>(count));
  }
  return absl::HashOf(all);
}

}  // namespace precondor::explore
