// SPDX-License-Identifier: Apache-2.0
#include "tests/explore/layer_world.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace precondor::explore {
namespace {

using Kind = Item::Kind;

constexpr absl::string_view kItemNames[] = {"statistics", "gradient", "resume", "fetch", "begin"};

std::string NameOf(const Item& item) {
  return absl::StrCat(kItemNames[static_cast<size_t>(item.kind)], " of step ", item.step,
                      item.kind == Kind::kResume ? absl::StrCat(" (factors ", item.version, ")") : "");
}

std::string NameOf(const Answer& answer) {
  return absl::StrCat(DecisionName(answer.decision), " with factors ", answer.version, " of steps {",
                      absl::StrJoin(answer.factors, ",", [](std::string* out, uint8_t s) { absl::StrAppend(out, s); }),
                      "}");
}

// That a run may meet; each ends a process.
constexpr int kMostErrors = 2;

bool SameItem(const Item& a, const Item& b) { return a.kind == b.kind && a.step == b.step; }

const Item* Find(const std::vector<Item>& items, const Item& item) {
  const auto found = std::find_if(items.begin(), items.end(), [&](const Item& of) { return SameItem(of, item); });
  return found == items.end() ? nullptr : &*found;
}

bool Erase(std::vector<Item>& items, const Item& item) {
  return std::erase_if(items, [&](const Item& of) { return SameItem(of, item); }) > 0;
}

void Insert(std::vector<Item>& queue, const Item& item) {
  if (Find(queue, item) != nullptr) return;
  queue.insert(std::upper_bound(queue.begin(), queue.end(), item.place,
                                [](int64_t place, const Item& of) { return place < of.place; }),
               item);
}

}  // namespace

LayerExplorer::LayerExplorer(const WorldLimits& limits, PlantedBug bug) : limits_(limits), bug_(bug) {
  spec_.name = "job";
  spec_.world_size = limits.ranks;
  spec_.exchange = limits.exchange;
  spec_.inv_freq = 1;
  spec_.layers = {LayerSpec{.name = "layer", .d_out = 1, .d_in = 1}};
  rules_ = {.spec = &spec_, .layer = 0, .needs_statistics = !limits.learns, .window_steps = limits.window};
}

LayerWorld LayerExplorer::Start() const {
  LayerWorld world(rules_);
  world.ranks.resize(static_cast<size_t>(limits_.ranks));
  world.first_steps.resize(world.ranks.size());
  (void)world.machine.Step(FactorsReplaced{});
  return world;
}

void LayerExplorer::Tell(const std::string& line) const {
  if (story_ != nullptr) story_->push_back(line);
}

bool LayerExplorer::IsDone(const LayerWorld& world) const {
  return std::all_of(world.ranks.begin(), world.ranks.end(),
                     [&](const Rank& rank) { return rank.step == limits_.steps; });
}

// --- what can happen ------------------------------------------------------------------------------------------------

std::vector<Move> LayerExplorer::MovesOf(const LayerWorld& world) const {
  std::vector<Move> moves;
  if (IsDone(world)) return moves;
  // At once, since nothing comes of waiting with them: a rank that connects later sends later, which is another order.
  for (uint8_t i = 0; i < world.ranks.size(); ++i) {
    if (world.ranks[i].epoch != world.epoch) return {{Move::Kind::kJoin, i}};
    if (!world.ranks[i].connected) return {{Move::Kind::kConnect, i}};
  }
  for (uint8_t i = 0; i < world.ranks.size(); ++i) {
    const Rank& rank = world.ranks[i];
    const bool has_factors = rank.fetched || !rules_.workers_precondition();
    if (rank.step < limits_.steps && !rank.begun && has_factors) moves.push_back({Move::Kind::kBegin, i});
    const bool reading = std::none_of(world.requests.begin(), world.requests.end(), [&](const Request& request) {
      return request.rank == i && request.stream == rank.stream;
    });
    if (reading && !rank.queue.empty() && MaySend(world, rank.queue.front())) moves.push_back({Move::Kind::kSend, i});
    if (!rank.replies.empty()) moves.push_back({Move::Kind::kReceive, i});
    if (world.broken_streams < limits_.broken_streams) moves.push_back({Move::Kind::kBreak, i});
    if (world.rank_crashes < limits_.rank_crashes) moves.push_back({Move::Kind::kCrashRank, i});
  }
  for (uint8_t i = 0; i < world.requests.size(); ++i) moves.push_back({Move::Kind::kRequest, i});
  if (!world.work.empty()) moves.push_back({Move::Kind::kWork});
  if (world.shard_crashes < limits_.shard_crashes) {
    const size_t least = limits_.loses_log ? 0 : world.journal.size();
    const size_t least_gradients = limits_.loses_log ? 0 : world.gradients.size();
    for (size_t records = least; records <= world.journal.size(); ++records) {
      for (size_t gradients = least_gradients; gradients <= world.gradients.size(); ++gradients) {
        moves.push_back({Move::Kind::kCrashShard, 0, static_cast<uint8_t>(records), static_cast<uint8_t>(gradients)});
      }
    }
  }
  return moves;
}

void LayerExplorer::Do(const Move& move, LayerWorld& world, std::vector<std::string>* story) const {
  story_ = story;
  const uint8_t rank = move.rank;
  switch (move.kind) {
    case Move::Kind::kBegin:
      Begin(world, rank);
      break;
    case Move::Kind::kConnect:
      Connect(world, rank);
      break;
    case Move::Kind::kSend:
      Send(world, rank);
      break;
    case Move::Kind::kRequest:
      Ask(world, rank);
      break;
    case Move::Kind::kReceive:
      Receive(world, rank);
      break;
    case Move::Kind::kJoin:
      Join(world, rank);
      break;
    case Move::Kind::kWork:
      Work(world);
      break;
    case Move::Kind::kBreak:
      Tell(absl::StrCat("rank ", rank, ": its stream breaks"));
      ++world.broken_streams;
      world.ranks[rank].connected = false;
      world.ranks[rank].replies.clear();
      break;
    case Move::Kind::kCrashRank:
      ++world.rank_crashes;
      Restart(world, rank);
      break;
    case Move::Kind::kCrashShard:
      Tell(absl::StrCat(
          "the shard is killed, and comes back with ", move.records, " of ", world.journal.size(), " records",
          limits_.learns ? absl::StrCat(" and ", move.gradients, " of ", world.gradients.size(), " gradients") : ""));
      ++world.shard_crashes;
      CrashShard(world, move.records, move.gradients);
      break;
  }
  story_ = nullptr;
}

// --- ranks ----------------------------------------------------------------------------------------------------------

void LayerExplorer::Begin(LayerWorld& world, uint32_t index) const {
  Rank& rank = world.ranks[index];
  Tell(absl::StrCat("rank ", index, ": begins step ", rank.step));
  if (rank.queue.empty() && rank.sent.empty()) rank.checkpoint = rank.step;
  rank.begun = true;
  if (!limits_.learns) rank.queue.push_back({.kind = Kind::kStatistics, .step = rank.step, .place = rank.next_place++});
  if (SendsGradient(index)) {
    rank.queue.push_back({.kind = Kind::kGradient, .step = rank.step, .place = rank.next_place++});
  }
  GoOn(world);
}

// In DELEGATE and SHARDED a step's gradient is the average of all ranks.
bool LayerExplorer::MaySend(const LayerWorld& world, const Item& item) const {
  const bool averaged = limits_.exchange == ExchangeMode::kDelegate || limits_.exchange == ExchangeMode::kSharded;
  if (!averaged || item.kind != Kind::kGradient) return true;
  return std::all_of(world.ranks.begin(), world.ranks.end(),
                     [&](const Rank& rank) { return rank.step > item.step || (rank.step == item.step && rank.begun); });
}

bool LayerExplorer::MayGoOn(const LayerWorld& world, uint32_t index) const {
  const Rank& rank = world.ranks[index];
  if (!rank.begun || rank.step >= limits_.steps) return false;
  if (!SendsGradient(index)) {
    // The delegate gives the job its answers.
    const Rank& delegate = world.ranks[static_cast<size_t>(DelegateRank(spec_, 0))];
    return delegate.step > rank.step || (delegate.last_answer.has_value() && delegate.last_answer->first >= rank.step);
  }
  return rank.last_answer.has_value() && rank.last_answer->first >= rank.step;
}

void LayerExplorer::Connect(LayerWorld& world, uint32_t index) const {
  Rank& rank = world.ranks[index];
  Tell(absl::StrCat("rank ", index, ": connects"));
  const bool other = rank.shard_life != 0 && rank.shard_life != world.shard_life;
  const bool unheard = rank.shard_life != world.shard_life && !rank.last_answer.has_value();
  rank.shard_life = world.shard_life;
  rank.connected = true;
  ++rank.stream;
  for (const Item& item : std::exchange(rank.sent, {})) Insert(rank.queue, item);
  if (!rank.fetched && rules_.workers_precondition()) {
    Insert(rank.queue, {.kind = Kind::kFetch, .step = rank.step, .place = -1000});
  }
  const uint64_t first_step = world.first_steps[index];
  if (unheard && first_step > 0 && !rules_.workers_precondition() && bug_ != PlantedBug::kForgetsToBegin) {
    Insert(rank.queue, {.kind = Kind::kBegin, .step = first_step, .place = -2000, .already_answered = true});
  }
  if (!other) return;
  std::optional<uint64_t> first_gradient;
  for (const Item& item : rank.kept) {
    if (bug_ == PlantedBug::kForgetsKept) break;
    if (item.kind == Kind::kGradient && !first_gradient.has_value()) first_gradient = item.step;
    Item again = item;
    again.already_answered = again.counted_before = true;
    Insert(rank.queue, again);
  }
  if (!rank.last_answer.has_value() || bug_ == PlantedBug::kForgetsRank) return;
  const uint64_t next = rank.last_answer->first + 1;
  Insert(rank.queue, {.kind = Kind::kResume,
                      .step = std::min(first_gradient.value_or(next), next),
                      .version = rank.last_answer->second,
                      .place = -2000,
                      .already_answered = true});
}

void LayerExplorer::Send(LayerWorld& world, uint32_t index) const {
  Rank& rank = world.ranks[index];
  const Item item = rank.queue.front();
  rank.queue.erase(rank.queue.begin());
  rank.sent.push_back(item);
  Tell(absl::StrCat("rank ", index, ": sends ", NameOf(item)));
  const ContributionKey key = {.epoch = rank.epoch, .step = item.step, .layer = 0, .rank = index};
  switch (item.kind) {
    case Kind::kResume:
    case Kind::kBegin:
      Feed(world,
           RankResumed{{.key = key,
                        .factor_version = item.version,
                        .next_step = rank.last_answer.has_value() ? rank.last_answer->first + 1 : item.step,
                        .begins = item.kind == Kind::kBegin},
                       {}},
           index, &item);
      return;
    case Kind::kFetch:
      Feed(world, FactorsRequested{.key = key}, index, &item);
      return;
    default:
      break;
  }
  const ContributionKind pull = rules_.workers_precondition() ? ContributionKind::kPull : ContributionKind::kGradient;
  const ContributionArrived event{.key = key,
                                  .kind = item.kind == Kind::kStatistics ? ContributionKind::kStatistics : pull,
                                  .digest = item.step + 1};
  Feed(world, event, index, &item);
}

void LayerExplorer::Receive(LayerWorld& world, uint32_t index) const {
  Rank& rank = world.ranks[index];
  const Reply reply = rank.replies.front();
  rank.replies.erase(rank.replies.begin());
  const Item* const sent = Find(rank.sent, reply.item);
  if (sent == nullptr) return;  // answered already
  const Item item = *sent;
  if (reply.answer.has_value()) {
    Tell(absl::StrCat("rank ", index, ": is answered ", NameOf(*reply.answer), " to its ", NameOf(item)));
    Erase(rank.sent, item);
    if (!item.already_answered) Answered(world, index, item, *reply.answer);
    return;
  }
  if (!reply.acknowledged) return Refused(world, index, reply);
  if (item.already_answered || item.kind == Kind::kStatistics) Erase(rank.sent, item);
  if (item.kind == Kind::kStatistics && !item.already_answered) {
    rank.kept.push_back(item);
    rank.retained = item;
    // A rank that sends no gradient keeps those of three steps.
    if (!SendsGradient(index) && rank.kept.size() > 3) rank.kept.erase(rank.kept.begin());
  }
}

void LayerExplorer::Refused(LayerWorld& world, uint32_t index, const Reply& reply) const {
  Rank& rank = world.ranks[index];
  const Item item = *Find(rank.sent, reply.item);
  Tell(absl::StrCat("rank ", index, ": its ", NameOf(item), " is refused: ", ErrorReasonName(reply.refused)));
  Erase(rank.sent, item);
  switch (reply.refused) {
    case ErrorReason::kStaleEpoch:
    case ErrorReason::kFutureEpoch:
    case ErrorReason::kNotActive:
    case ErrorReason::kStepTooFarAhead:
      Insert(rank.queue, item);
      return;
    case ErrorReason::kStateLost:
      // The trainer goes back to a checkpoint that all ranks have: what they had after it is another history.
      world.answers.clear();
      ReplaceFinished(world, 0);
      return ReplaceRank(world, index, 0);
    default:
      break;
  }
  const bool counted = item.already_answered || item.counted_before;
  if (counted || (item.kind == Kind::kStatistics && reply.refused == ErrorReason::kStaleStep)) return;
  if (rules_.workers_precondition() && item.kind == Kind::kGradient && reply.refused == ErrorReason::kStaleStep) {
    // Made up for by fetching the factors.
    rank.fetched = false;
    rank.connected = false;
    rank.last_answer = {item.step, rank.last_answer.has_value() ? rank.last_answer->second : 0};
    GoOn(world);
    return;
  }
  // An error that the trainer gets: the process ends with it, and another one begins at the checkpoint.
  if (reply.refused == ErrorReason::kStaleStep && ++world.errors <= kMostErrors) {
    const uint64_t checkpoint = rank.checkpoint;
    if (limits_.learns && !IsExact()) ReplaceFinished(world, checkpoint);
    return ReplaceRank(world, index, checkpoint);
  }
  world.violation = absl::StrCat("I7: rank ", index, " cannot act on the refusal of its ", NameOf(item), ": ",
                                 ErrorReasonName(reply.refused));
}

void LayerExplorer::Answered(LayerWorld& world, uint32_t index, const Item& item, const Answer& answer) const {
  Rank& rank = world.ranks[index];
  if (item.kind == Kind::kFetch) {
    rank.factors = answer.factors;
    rank.fetched = true;
    if (!rank.last_answer.has_value() && item.step > 0) rank.last_answer = {item.step - 1, answer.version};
    return;
  }
  if (rules_.workers_precondition() && answer.decision == Decision::kPreconditioned) rank.factors = answer.factors;
  // I3: all ranks that get an answer to a step get one answer.
  Answer used = answer;
  if (rules_.workers_precondition()) used = {.decision = Decision::kPreconditioned, .factors = rank.factors};
  LayerWorld::Had& first =
      world.answers.try_emplace({world.rollback_epoch, item.step}, LayerWorld::Had{used, {}}).first->second;
  if (!(first.answer == used)) {
    world.violation = absl::StrCat("I3: at step ", item.step, " rank ", index, " has ", NameOf(used),
                                   ", another rank had ", NameOf(first.answer));
    return;
  }
  first.ranks.insert(index);
  // All ranks have had these by now, since each submits after its last answer.
  std::erase_if(rank.kept, [&](const Item& of) { return of.step < item.step; });
  const bool several =
      rules_.workers_precondition() || (limits_.exchange != ExchangeMode::kDelegate && limits_.ranks > 1);
  if (several) rank.kept.push_back(item);
  if (rank.retained.has_value() && rank.retained->step <= item.step) rank.retained.reset();
  rank.last_answer = {item.step, answer.version};
  GoOn(world);
}

void LayerExplorer::GoOn(LayerWorld& world) const {
  for (uint32_t i = 0; i < world.ranks.size(); ++i) {
    if (!MayGoOn(world, i)) continue;
    ++world.ranks[i].step;
    world.ranks[i].begun = false;
  }
}

// --- epochs ---------------------------------------------------------------------------------------------------------

void LayerExplorer::Restart(LayerWorld& world, uint32_t index) const {
  const Rank& rank = world.ranks[index];
  // One that has done all its steps has a checkpoint of that, too.
  const bool finished = rank.step == limits_.steps && rank.queue.empty() && rank.sent.empty();
  const uint64_t first_step = finished ? rank.step : rank.checkpoint;
  Tell(absl::StrCat("rank ", index, ": its process is killed; the next one begins with step ", first_step));
  ReplaceRank(world, index, first_step);
}

void LayerExplorer::ReplaceFinished(LayerWorld& world, uint64_t first_step) const {
  for (uint32_t i = 0; i < world.ranks.size(); ++i) {
    if (world.ranks[i].step == limits_.steps) ReplaceRank(world, i, first_step);
  }
}

void LayerExplorer::ReplaceRank(LayerWorld& world, uint32_t index, uint64_t first_step) const {
  // An answer that only a process that is gone knew may be another after a loss.
  for (auto& [key, had] : world.answers) {
    if (limits_.learns && !rules_.one_answer() && !IsExact() && key.second >= first_step) had.ranks.erase(index);
  }
  std::erase_if(world.answers, [](const auto& of) { return of.second.ranks.empty(); });
  world.ranks[index] = Rank{.step = first_step, .checkpoint = first_step, .epoch = ++world.epoch};
  world.first_steps[index] = first_step;
  const uint64_t first_kept = world.machine.first_kept();
  Feed(world,
       EpochEnded{.epoch = world.epoch,
                  .why = ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch, "epoch")},
       0, nullptr);
  if (first_step < first_kept) {
    world.rollback_epoch = world.epoch;
    world.rollback_step = first_step;
    for (uint64_t& first : world.first_steps) first = std::min(first, first_step);
    Tell(absl::StrCat("the job goes back to step ", first_step));
  }
  Feed(world,
       EpochBegan{.epoch = world.epoch,
                  .rollback_epoch = world.rollback_epoch,
                  .rollback_step = world.rollback_step,
                  .replaced = {{.rank = index, .first_step = first_step}}},
       0, nullptr);
}

void LayerExplorer::Join(LayerWorld& world, uint32_t index) const {
  Rank& rank = world.ranks[index];
  Tell(absl::StrCat("rank ", index, ": joins epoch ", world.epoch));
  if (world.rollback_epoch > rank.epoch) {
    const Rank before = rank;
    rank = {.step = world.rollback_step, .checkpoint = world.rollback_step, .epoch = world.epoch};
    rank.stream = before.stream;
    return;
  }
  rank.epoch = world.epoch;
  rank.connected = false;
  rank.replies.clear();
  if (!rank.retained.has_value()) return;
  // Acknowledged, of a step that may not have been sealed: it counts as not answered.
  Item again = *std::exchange(rank.retained, std::nullopt);
  again.counted_before = true;
  Insert(rank.queue, again);
}

// --- one state from another -----------------------------------------------------------------------------------------

uint64_t LayerExplorer::Fingerprint(const LayerWorld& world) const {
  std::vector<uint64_t> all;
  const auto put = [&all](auto value) { all.push_back(static_cast<uint64_t>(value)); };
  const auto put_items = [&](const std::vector<Item>& items) {
    put(items.size());
    for (const Item& item : items) {
      put(item.kind);
      put(item.step);
      put(item.version);
      put(item.already_answered);
      put(item.counted_before);
    }
  };
  const auto put_answer = [&](const Answer& answer) {
    put(answer.decision);
    put(answer.version);
    put(answer.factors.size());
    for (const uint8_t step : answer.factors) put(step);
  };
  std::map<StepId, uint64_t> step_of;
  for (const auto& [step, of] : world.machine.window().steps()) step_of[of.id] = step + 1;
  const auto put_id = [&](StepId id) { put(step_of.contains(id) ? step_of.at(id) : 0); };
  for (const Rank& rank : world.ranks) {
    for (const uint64_t value : {rank.step, uint64_t{rank.begun}, uint64_t{rank.fetched}, rank.checkpoint, rank.epoch,
                                 uint64_t{rank.connected}, uint64_t{rank.shard_life}}) {
      put(value);
    }
    put_items(rank.queue);
    put_items(rank.sent);
    put_items(rank.kept);
    put(rank.retained.has_value() ? rank.retained->step + 1 : 0);
    put(rank.last_answer.has_value() ? rank.last_answer->first * 64 + rank.last_answer->second + 1 : 0);
    put(rank.factors.size());
    for (const uint8_t step : rank.factors) put(step);
    put(rank.replies.size());
    for (const Reply& reply : rank.replies) {
      put_items({reply.item});
      put(reply.acknowledged);
      put(reply.refused);
      if (reply.answer.has_value()) put_answer(*reply.answer);
    }
  }
  for (const Effect& effect : world.work) {
    put(effect.index());
    if (const auto* apply = std::get_if<ApplyUpdate>(&effect)) put_id(apply->id), put(apply->step);
    if (const auto* compute = std::get_if<ComputeAnswer>(&effect)) put_id(compute->id);
    if (const auto* deliver = std::get_if<DeliverAnswer>(&effect)) put_id(deliver->id);
    if (const auto* append = std::get_if<AppendUpdate>(&effect)) put(append->step);
    if (const auto* plan = std::get_if<AppendPlan>(&effect)) put(plan->step);
  }
  for (const Request& request : world.requests) {
    put(request.rank + 1);
    put(world.ranks[request.rank].connected && world.ranks[request.rank].stream == request.stream);
    put(request.key.epoch);
    put_items({request.item});
  }
  for (const auto& [id, requests] : world.waiting) {
    put_id(id);
    for (const Waiting& of : requests) {
      if (world.ranks[of.rank].connected && world.ranks[of.rank].stream == of.stream) put(of.rank + 1);
    }
  }
  for (const auto& [id, answer] : world.made) put_id(id), put_answer(answer);
  for (const uint8_t step : world.factors) put(step + 1);
  for (const uint64_t first_step : world.first_steps) put(first_step);
  for (const Record& record : world.journal) {
    for (const uint64_t value : {uint64_t{record.is_plan}, record.step, record.rollback_epoch, uint64_t{record.empty},
                                 record.plan.factor_version}) {
      put(value);
    }
  }
  for (const GradientEntry& entry : world.gradients) put(entry.step), put(entry.rollback_epoch), put(entry.version);
  put(world.appended + 2 * world.unwritten.has_value());
  for (const auto& [key, had] : world.answers) {
    put(key.first), put(key.second), put_answer(had.answer);
    for (const uint32_t rank : had.ranks) put(rank + 1);
  }
  for (const uint64_t value : {uint64_t{world.shard_life}, world.epoch, world.rollback_epoch, world.rollback_step,
                               static_cast<uint64_t>(world.shard_crashes * 512 + world.rank_crashes * 64 +
                                                     world.broken_streams * 8 + world.errors)}) {
    put(value);
  }
  return absl::HashOf(all, world.machine);
}

}  // namespace precondor::explore
