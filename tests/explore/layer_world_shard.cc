// SPDX-License-Identifier: Apache-2.0
// The shard of a world: its machine's effects as LayerDriver carries them out, its journal, and how it comes back.
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/explore/layer_world.h"

namespace precondor::explore {
namespace {

using Kind = Item::Kind;

}  // namespace

void LayerExplorer::Feed(LayerWorld& world, const LayerEvent& event, uint32_t rank, const Item* item) const {
  const uint8_t stream = world.ranks[rank].stream;
  bool refused = false;
  const Effects effects = world.machine.Step(event);
  if (std::holds_alternative<RankResumed>(event) && item->kind == Kind::kResume) CheckResume(world, *item, effects);
  for (const Effect& effect : effects) {
    if (const auto* reply = std::get_if<SenderReply>(&effect)) {
      refused = !reply->status.ok();
      Reply_(world, static_cast<uint8_t>(rank), stream,
             {.item = *item, .acknowledged = !refused, .refused = GetErrorReason(reply->status)});
    } else if (std::holds_alternative<FetchFactors>(effect)) {
      ApplyPending(world);
      const bool has = !world.factors.empty();
      Reply_(world, static_cast<uint8_t>(rank), stream,
             {.item = *item,
              .answer = Answer{.decision = has ? Decision::kPreconditioned : Decision::kIdentity,
                               .version = world.factors.size(),
                               .factors = world.factors}});
    } else if (std::holds_alternative<WakeWorker>(effect)) {
      world.work.push_back(effect);
    } else {
      Carry(world, effect);
    }
  }
  const auto* arrived = std::get_if<ContributionArrived>(&event);
  if (arrived != nullptr && !refused && arrived->kind != ContributionKind::kStatistics) {
    world.requests.push_back({static_cast<uint8_t>(rank), stream, arrived->key, *item});
    if (!limits_.splits_requests) Ask(world, static_cast<uint8_t>(world.requests.size() - 1));
  }
  if (std::holds_alternative<RankResumed>(event) && !refused) {
    Reply_(world, static_cast<uint8_t>(rank), stream, {.item = *item, .acknowledged = true});
  }
}

void LayerExplorer::Ask(LayerWorld& world, uint8_t index) const {
  const Request request = world.requests[index];
  world.requests.erase(world.requests.begin() + index);
  for (const Effect& effect : world.machine.Step(AnswerRequested{request.key})) {
    if (const auto* refusal = std::get_if<SenderReply>(&effect)) {
      Reply_(world, request.rank, request.stream, {.item = request.item, .refused = GetErrorReason(refusal->status)});
    } else if (const auto* await = std::get_if<AwaitAnswer>(&effect)) {
      world.waiting[await->id].push_back({request.rank, request.stream, request.item});
    } else if (const auto* give = std::get_if<GiveAnswer>(&effect)) {
      Reply_(world, request.rank, request.stream, {.item = request.item, .answer = world.made.at(give->id)});
    }
  }
}

void LayerExplorer::Reply_(LayerWorld& world, uint8_t rank, uint8_t stream, Reply reply) const {
  Rank& to = world.ranks[rank];
  if (to.connected && to.stream == stream) to.replies.push_back(std::move(reply));
}

// The worker does one effect at a time, so that anything can happen between two of them.
void LayerExplorer::Work(LayerWorld& world) const {
  const Effect effect = world.work.front();
  if (const auto* compute = std::get_if<ComputeAnswer>(&effect);
      compute != nullptr && LearnsFrom(world, *compute) && !std::exchange(world.appended, true)) {
    const GradientEntry entry{compute->step, world.machine.rollback_epoch(), world.factors.size()};
    if (bug_ == PlantedBug::kAnswersFirst) {
      world.unwritten = entry;
    } else if (limits_.logs_gradients) {
      world.gradients.push_back(entry);
    }
    return;
  }
  world.appended = false;
  world.work.erase(world.work.begin());
  Carry(world, effect);
}

bool LayerExplorer::LearnsFrom(const LayerWorld& world, const ComputeAnswer& effect) const {
  const bool planned = effect.plan.has_value() && effect.plan->decision == Decision::kPreconditioned;
  return limits_.learns && !(planned && effect.plan->factor_version == world.factors.size());
}

void LayerExplorer::CheckResume(LayerWorld& world, const Item& item, const Effects& effects) const {
  bool lost = false, told = false;
  for (const Effect& effect : effects) {
    const auto* refuse = std::get_if<SenderReply>(&effect);
    lost = lost || (refuse != nullptr && GetErrorReason(refuse->status) == ErrorReason::kStateLost);
    told = told || refuse != nullptr || std::holds_alternative<ReportUpdatesLost>(effect);
  }
  if ((lost || (limits_.learns && told && item.version > world.factors.size())) && IsExact()) {
    world.violation = "I5: the shard lacks what its journal has";
  }
  if (limits_.learns && item.version > world.factors.size() && !told) {
    world.violation = "I3: a rank that goes on with older factors is not told";
  }
}

// As LayerDriver::Answer and LayerWorker do.
void LayerExplorer::Compute(LayerWorld& world, const ComputeAnswer& effect) const {
  const bool lacks =
      limits_.learns && effect.plan.has_value() && effect.plan->factor_version > world.factors.size() + 1;
  if (LearnsFrom(world, effect)) {
    Tell(absl::StrCat("shard: takes in the gradient of step ", effect.step));
    world.factors.push_back(static_cast<uint8_t>(effect.step));
  }
  const bool has = !world.factors.empty();
  Answer answer{.decision = has ? Decision::kPreconditioned : Decision::kIdentity,
                .version = world.factors.size(),
                .factors = world.factors};
  if (effect.plan.has_value() && effect.plan->decision == Decision::kIdentity) answer.decision = Decision::kIdentity;
  if (answer.decision == Decision::kIdentity) answer.factors.clear();
  world.made[effect.id] = answer;
  const Effects effects = world.machine.Step(
      AnswerDone{.id = effect.id,
                 .plan = {.decision = answer.decision, .factor_version = answer.version, .reason = {}},
                 .plan_holds = !lacks,
                 .factor_version = world.factors.size()});
  world.work.insert(world.work.begin(), effects.begin(), effects.end());
}

void LayerExplorer::ApplyPending(LayerWorld& world) const {
  std::vector<Effect> later = std::exchange(world.work, {});
  for (const Effect& effect : world.machine.Step(FactorsNeeded{})) Carry(world, effect);
  while (!world.work.empty()) Work(world);
  world.work = std::move(later);
}

void LayerExplorer::Carry(LayerWorld& world, const Effect& effect) const {
  const auto then = [&world](const Effects& effects) {
    world.work.insert(world.work.begin(), effects.begin(), effects.end());
  };
  if (std::holds_alternative<WakeWorker>(effect)) {
    // The worker asks for work until there is none.
    const Effects next = world.machine.Step(WorkerReady{});
    if (!next.empty()) world.work.insert(world.work.begin(), WakeWorker{});
    then(next);
  } else if (const auto* append = std::get_if<AppendUpdate>(&effect)) {
    if (world.unwritten.has_value()) world.gradients.push_back(*std::exchange(world.unwritten, std::nullopt));
    if (!append->logged && bug_ != PlantedBug::kLosesUpdate) {
      world.journal.push_back(
          {.step = append->step, .rollback_epoch = world.machine.rollback_epoch(), .empty = append->ranks.empty()});
    }
  } else if (const auto* apply = std::get_if<ApplyUpdate>(&effect)) {
    const absl::string_view left = apply->empty ? ", of which nothing is left" : "";
    Tell(absl::StrCat("shard: updates the factors with step ", apply->step, left));
    if (!apply->empty) world.factors.push_back(static_cast<uint8_t>(apply->step));
    then(world.machine.Step(UpdateDone{.id = apply->id,
                                       .step = apply->step,
                                       .logged = apply->logged,
                                       .restored = apply->logged && !apply->empty,
                                       .factor_version = world.factors.size()}));
  } else if (const auto* compute = std::get_if<ComputeAnswer>(&effect)) {
    Compute(world, *compute);
  } else if (const auto* plan = std::get_if<AppendPlan>(&effect)) {
    world.journal.push_back(
        {.is_plan = true, .step = plan->step, .rollback_epoch = world.machine.rollback_epoch(), .plan = plan->plan});
  } else if (const auto* deliver = std::get_if<DeliverAnswer>(&effect)) {
    for (const Effect& shown : world.machine.Step(AnswerVisible{deliver->id})) {
      const auto* give = std::get_if<GiveAnswer>(&shown);
      for (const Waiting& of : std::exchange(world.waiting[give->id], {})) {
        Reply_(world, of.rank, of.stream, {.item = of.item, .answer = world.made.at(give->id)});
      }
    }
    (void)world.machine.Step(AnswerDelivered{});
    if (world.unwritten.has_value()) world.work.insert(world.work.begin(), AppendUpdate{.logged = true});
  } else if (const auto* end = std::get_if<EndRequests>(&effect)) {
    for (const Waiting& of : std::exchange(world.waiting[end->id], {})) {
      Reply_(world, of.rank, of.stream, {.item = of.item, .refused = GetErrorReason(end->status)});
    }
  } else if (const auto* drop = std::get_if<DropStep>(&effect)) {
    world.waiting.erase(drop->id);
    world.made.erase(drop->id);
  }
}

// As LayerReplay does it with the records of a log that began with the session.
void LayerExplorer::CrashShard(LayerWorld& world, size_t records, size_t gradients) const {
  world.journal.resize(records);
  world.gradients.resize(gradients);
  world.appended = false;
  world.unwritten.reset();
  struct Replayed {
    RestoredStep restored;
    bool applies = false;
    Answer answer = {};
  };
  std::map<uint64_t, Replayed> steps;
  uint64_t rollback_epoch = 0;
  world.factors.clear();
  const auto apply = [&world](const Replayed& replayed) {
    if (replayed.applies) world.factors.push_back(static_cast<uint8_t>(replayed.restored.step));
  };
  const auto roll_back_to = [&](uint64_t epoch) {
    if (epoch <= rollback_epoch) return;
    rollback_epoch = epoch;
    for (const auto& [step, replayed] : steps) apply(replayed);
    steps.clear();
  };
  const auto shrink = [&] {
    while (!steps.empty() && steps.begin()->first + limits_.window <= steps.rbegin()->first) {
      apply(steps.begin()->second);
      steps.erase(steps.begin());
    }
  };
  for (const Record& record : world.journal) {
    roll_back_to(record.rollback_epoch);
    if (record.rollback_epoch < rollback_epoch) continue;
    Replayed& replayed = steps[record.step];
    replayed.restored.step = record.step;
    if (record.is_plan) {
      replayed.restored.plan = record.plan;
    } else {
      replayed.restored.updated = replayed.restored.update_pending = true;
      replayed.restored.update_is_empty = record.empty;
      replayed.applies = !record.empty;
    }
    shrink();
  }
  for (const GradientEntry& entry : world.gradients) {
    if (entry.version != world.factors.size()) continue;
    world.factors.push_back(static_cast<uint8_t>(entry.step));
    roll_back_to(entry.rollback_epoch);
    if (entry.rollback_epoch < rollback_epoch) continue;
    Replayed& replayed = steps[entry.step];
    replayed.restored.step = entry.step;
    replayed.restored.answered = true;
    replayed.answer = {Decision::kPreconditioned, world.factors.size(), world.factors};
    replayed.restored.plan = Plan{Decision::kPreconditioned, world.factors.size(), ""};
    shrink();
  }
  roll_back_to(world.rollback_epoch);
  bool answered = false;
  for (auto later = steps.rbegin(); later != steps.rend(); ++later) {
    answered = answered || later->second.restored.plan.has_value();
    if (answered) later->second.restored.updated = true;
  }
  ReplayFinished finished{.rollback_epoch = rollback_epoch, .steps = {}, .factor_version = world.factors.size()};
  for (auto& [step, replayed] : steps) {
    RestoredStep& restored = replayed.restored;
    restored.passed = !restored.answered && restored.plan.has_value() &&
                      restored.plan->decision == Decision::kPreconditioned &&
                      restored.plan->factor_version < world.factors.size();
    finished.steps.push_back(restored);
  }
  std::vector<Member> members;
  for (uint32_t i = 0; i < world.ranks.size(); ++i) members.push_back({.rank = i, .first_step = world.first_steps[i]});
  if (bug_ == PlantedBug::kForgetsBegin) members.clear();
  world.machine = LayerMachine(rules_, world.epoch, world.rollback_epoch, members);
  world.work.clear();
  world.requests.clear();
  world.waiting.clear();
  world.made.clear();
  ++world.shard_life;
  for (Rank& rank : world.ranks) {
    rank.connected = false;
    rank.replies.clear();
  }
  Feed(world, finished, 0, nullptr);
  for (const auto& [step, of] : world.machine.window().steps()) {
    if (steps.contains(step) && steps.at(step).restored.answered) world.made[of.id] = steps.at(step).answer;
  }
}

}  // namespace precondor::explore
