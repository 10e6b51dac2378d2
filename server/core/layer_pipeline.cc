// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer_pipeline.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/payload.h"
#include "server/core/reservation.h"
#include "server/policy/sealing.h"

namespace precondor {
namespace {

Gather StatisticsContributors(const SessionSpec& spec) { return Gather(0, spec.world_size); }

Gather GradientContributorsOf(const SessionSpec& spec, uint32_t layer) {
  if (spec.exchange == ExchangeMode::kDelegate) return Gather(DelegateRank(spec, layer), 1);
  return Gather(0, spec.world_size);
}

}  // namespace

absl::StatusOr<std::shared_ptr<LayerPipeline>> LayerPipeline::Create(std::shared_ptr<SessionContext> session,
                                                                     uint32_t layer, const SessionInstall& install,
                                                                     bool held) {
  std::unique_ptr<LayerState> state;
  if (held) {
    PRECONDOR_ASSIGN_OR_RETURN(state, session->MakeState(layer));
  }
  return std::shared_ptr<LayerPipeline>(new LayerPipeline(std::move(session), layer, install, std::move(state)));
}

LayerPipeline::LayerPipeline(std::shared_ptr<SessionContext> session, uint32_t layer, const SessionInstall& install,
                             std::unique_ptr<LayerState> state)
    : session_(std::move(session)),
      layer_(layer),
      executor_(session_->DeviceOf(layer).executor),
      strand_(executor_.NewStrand()),
      worker_(*session_, layer, std::move(state)),
      journal_(*session_, layer, install.went_back_epoch),
      epoch_(install.epoch),
      began_(install.went_back_epoch) {
  const LayerWorker::StateView view = worker_.view();
  MutexLock lock(mu_);
  stats_.layer = layer;
  stats_.name = session_->spec.layers[layer].name;
  stats_.device = session_->DeviceOf(layer).place;
  Show(view);
}

bool LayerPipeline::ExpectsStatistics(const StepSlot& slot) const {
  return slot.mode == Mode::kSecondOrder && session_->methods.of(layer_).needs_statistics() &&
         IsStatisticStep(session_->spec, slot.step);
}

// --- the window of steps --------------------------------------------------------------------------------------------

absl::Status LayerPipeline::CheckStep(const ContributionHeader& header) const {
  MutexLock lock(mu_);
  if (ComesTooLate(header)) return absl::OkStatus();
  absl::Status status = CheckStepLocked(header.key, header.mode);
  // Of the ranks that are owed an answer this one may be the last; only Put takes note of that.
  return GetErrorReason(status) == ErrorReason::kNotActive ? absl::OkStatus() : status;
}

uint64_t LayerPipeline::FirstToOpen() const {
  uint64_t first = opens_from_;
  for (const auto& [step, slot] : slots_) {
    if (slot->restored) first = std::max(first, step);
  }
  return first;
}

bool LayerPipeline::ComesTooLate(const ContributionHeader& header) const {
  const ContributionKey& key = header.key;
  return header.kind == ContributionKind::kStatistics && key.step < FirstToOpen() && !slots_.contains(key.step) &&
         CheckEpoch(key).ok() && CheckMemory(key).ok();
}

absl::Status LayerPipeline::CheckEpoch(const ContributionKey& key) const {
  if (key.epoch != epoch_) {
    // The session's membership was replaced just before or after its check.
    const bool ahead = key.epoch > epoch_;
    return ReasonedStatus(
        ahead ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition,
        ahead ? ErrorReason::kFutureEpoch : ErrorReason::kStaleEpoch,
        absl::StrCat(DescribeKey(session_->spec, key), ": expected epoch ", epoch_, ", got ", key.epoch));
  }
  return absl::OkStatus();
}

absl::Status LayerPipeline::CheckMemory(const ContributionKey& key) const {
  if (disowned_.empty()) return absl::OkStatus();
  if (!disowned_.contains(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                          absl::StrCat(DescribeKey(session_->spec, key), ": rank ", *disowned_.begin(),
                                       " has to begin again: the shard has lost factors that it knows"));
  }
  return ReasonedStatus(
      absl::StatusCode::kDataLoss, ErrorReason::kMemoryLost,
      absl::StrCat(DescribeKey(session_->spec, key), ": the shard has lost factors that ranks have had answers with, ",
                   "and cannot give the others the same: go back to a checkpoint with all ranks, and join again"));
}

absl::Status LayerPipeline::CheckStepLocked(const ContributionKey& key, Mode mode) const {
  PRECONDOR_RETURN_IF_ERROR(CheckEpoch(key));
  PRECONDOR_RETURN_IF_ERROR(CheckMemory(key));
  if (key.step < floor_) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(session_->spec, key), ": steps below ", floor_, " are retired"));
  }
  const auto found = slots_.find(key.step);
  if (found == slots_.end()) return CheckWindow(key);
  if (found->second->mode == mode) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kModeConflict,
                        absl::StrCat(DescribeKey(session_->spec, key), ": expected mode ",
                                     ModeName(found->second->mode), " as the step began, got ", ModeName(mode)));
}

absl::Status LayerPipeline::CheckWindow(const ContributionKey& key) const {
  if (const uint64_t first = FirstToOpen(); key.step < first) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(session_->spec, key),
                                       ": a rank has passed it, and sends nothing to steps below ", first));
  }
  const bool begins = to_begin_.contains(key.rank) && SendsGradient(key.rank);
  if (slots_.empty()) return absl::OkStatus();
  const uint64_t window = session_->shard->options.window_steps;
  const uint64_t newest = std::max(slots_.rbegin()->first, opens_from_);
  bool blocked = !has_gaps() && !begins && key.step > newest && key.step - newest > window;
  size_t kept = 1;
  for (const auto& [step, slot] : slots_) {
    if (begins && step < key.step && LacksFor(*slot, key.rank, key.step, /*resumes=*/false)) continue;
    const bool leaves = key.step > step && key.step - step >= window;
    if (const std::optional<uint32_t> rank = slot->owing(); leaves && rank.has_value()) {
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                            absl::StrCat(DescribeKey(session_->spec, key), ": rank ", *rank,
                                         " begins again and has not come past step ", step));
    }
    if (leaves && slot->restored && slot->gradient.state == PhaseState::kSealed) {
      // A rank that has had its answer before the shard came back may be ahead of those that get it now.
      return ReasonedStatus(
          absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
          absl::StrCat(DescribeKey(session_->spec, key), ": step ", step, " is being answered again"));
    }
    blocked = blocked || (leaves && !Closable(*slot));
    if (!leaves || !Finished(*slot)) ++kept;
  }
  if (!blocked && kept <= window + 1) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                        absl::StrCat(DescribeKey(session_->spec, key), ": step ", slots_.begin()->first,
                                     " is not finished or lies too far back; the window is ", window,
                                     " steps, and a step without a gradient needs an abstention"));
}

bool LayerPipeline::Closable(const StepSlot& slot) const {
  // A sealed gradient still owes answers; sealed statistics only want their turn.
  const bool statistics = slot.statistics.state != PhaseState::kOpen || slot.statistics.gather.empty();
  // A restored one has been answered as far as anybody needs it, once somebody asks for a step so much later.
  const bool answered = slot.gradient.state == PhaseState::kApplied || slot.gradient.state == PhaseState::kRetired;
  return statistics &&
         (answered || slot.gradient.untouched() || (slot.restored && slot.gradient.state != PhaseState::kSealed));
}

bool LayerPipeline::Finished(const StepSlot& slot) const {
  return Closable(slot) && slot.statistics.state != PhaseState::kSealed;
}

void LayerPipeline::RetireGradient(StepSlot& slot, std::vector<ResultFn>& waiters) {
  if (slot.gradient.state == PhaseState::kOpen && !slot.gradient.gather.empty()) {
    const int64_t unanswered = slot.gradient.gather.voted() + slot.gradient.gather.abstained();
    slot.in_flight -= unanswered;
    session_->shard->in_flight.fetch_sub(unanswered, std::memory_order_relaxed);
  }
  slot.gradient.Advance(PhaseEvent::kRetire);
  slot.result.reset();
  std::move(slot.waiters.begin(), slot.waiters.end(), std::back_inserter(waiters));
  slot.waiters.clear();
}

bool LayerPipeline::one_answer() const { return GradientContributors(session_->spec) == 1; }

bool LayerPipeline::SendsGradient(uint32_t rank) const {
  const SessionSpec& spec = session_->spec;
  return spec.exchange != ExchangeMode::kDelegate || rank == static_cast<uint32_t>(DelegateRank(spec, layer_));
}

// In DELEGATE nothing is sent in first order; workers that have factors send at statistic steps alone.
bool LayerPipeline::has_gaps() const {
  return session_->spec.exchange == ExchangeMode::kDelegate || WorkersPrecondition(session_->spec);
}

bool LayerPipeline::HasAnswered(uint64_t step) const {
  const auto found = slots_.find(step);
  return found != slots_.end() && (found->second->restored || found->second->gradient.state != PhaseState::kOpen);
}

bool LayerPipeline::LacksFor(const StepSlot& slot, uint32_t rank, uint64_t step, bool resumes) const {
  if (slot.gradient.state != PhaseState::kOpen || slot.gradient.gather.has(rank)) return false;
  // Answered before the shard came back, unless the journal has lost what came after it.
  const bool answered = slot.restored && (resumes || one_answer()) && HasAnswered(step - 1);
  return !answered;
}

bool LayerPipeline::PassOver(uint32_t rank, uint64_t step, bool resumes, std::vector<ResultFn>& retired) {
  if (!SendsGradient(rank)) return false;
  bool ended = false;
  if (step > 0 && !HasAnswered(step - 1)) opens_from_ = std::max(opens_from_, step);
  for (auto it = slots_.begin(); it != slots_.end() && it->first < step;) {
    StepSlot& slot = *it->second;
    if (!LacksFor(slot, rank, step, resumes)) {
      ++it;
      continue;
    }
    ended = true;
    opens_from_ = std::max(opens_from_, it->first + 1);
    RetireGradient(slot, retired);
    // Nor do all ranks send the statistics of such a step again.
    if (slot.statistics.state == PhaseState::kOpen) slot.statistics.Advance(PhaseEvent::kRetire);
    it = slot.statistics.state == PhaseState::kSealed ? std::next(it) : slots_.erase(it);
  }
  return ended;
}

bool LayerPipeline::NoteBegun(const ContributionKey& key, std::vector<ResultFn>& retired) {
  if (to_begin_.erase(key.rank) == 0 || WorkersPrecondition(session_->spec)) return false;
  bool work = PassOver(key.rank, key.step, /*resumes=*/false, retired);
  // Statistics that its predecessor did not get through, or that are lost with a shard, will not come.
  for (const auto& [step, slot] : slots_) {
    Phase& phase = slot->statistics;
    if (step >= key.step || !ExpectsStatistics(*slot)) continue;
    if (phase.state != PhaseState::kOpen || phase.gather.has(key.rank)) continue;
    phase.gather.Put(key.rank, Standing::kAbstained, /*digest=*/0, {});
    SealIfDue(*slot, ContributionKind::kStatistics, session_->shard->clock.Now());
    work = work || phase.state == PhaseState::kSealed;
  }
  return work;
}

bool LayerPipeline::IsAwaitedBefore(uint64_t step) const {
  return std::any_of(coming_.begin(), coming_.end(), [step](const auto& rank) { return rank.second.step < step; });
}

bool LayerPipeline::CountWhoHasBegunLater(StepSlot& slot) {
  const absl::Time now = session_->shard->clock.Now();
  bool counted = false;
  for (const auto& [rank, coming] : coming_) {
    if (!coming.begun || slot.step >= coming.first_step) continue;
    Phase &statistics = slot.statistics, &pulls = slot.gradient;
    if (ExpectsStatistics(slot) && statistics.state == PhaseState::kOpen && !statistics.gather.has(rank)) {
      statistics.gather.Put(rank, Standing::kAbstained, /*digest=*/0, {});
      slot.incomplete = true;
      SealIfDue(slot, ContributionKind::kStatistics, now);
      counted = true;
    }
    if (pulls.state == PhaseState::kOpen && !pulls.gather.has(rank)) {
      pulls.gather.Put(rank, Standing::kVoted, /*digest=*/0, {});
      ++slot.in_flight;
      session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
      SealIfDue(slot, ContributionKind::kPull, now);
      counted = true;
    }
  }
  return counted;
}

bool LayerPipeline::NoteComing(const ContributionKey& key) {
  const auto found = coming_.find(key.rank);
  if (found == coming_.end()) return false;
  Coming& coming = found->second;
  bool work = std::exchange(coming.step, std::max(coming.step, key.step)) < key.step;
  if (std::exchange(coming.begun, true)) return work;
  for (const auto& [step, slot] : slots_) work = CountWhoHasBegunLater(*slot) || work;
  return work;
}

absl::Status LayerPipeline::Expired() const {
  return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                        absl::StrCat("session \"", session_->spec.name, "\" layer \"",
                                     session_->spec.layers[layer_].name, "\": the step is retired"));
}

StepSlot& LayerPipeline::OpenSlot(uint64_t step, Mode mode, std::vector<ResultFn>& retired) {
  if (auto found = slots_.find(step); found != slots_.end()) return *found->second;
  const uint64_t window = session_->shard->options.window_steps;
  if (step + 1 > window) floor_ = std::max(floor_, step + 1 - window);
  for (auto it = slots_.begin(); it != slots_.end() && it->first < floor_;) {
    StepSlot& old = *it->second;
    // Nobody will send this gradient any more, and nobody may ask for it again.
    RetireGradient(old, retired);
    if (old.statistics.state == PhaseState::kSealed) {
      ++it;
      continue;
    }
    old.statistics.Advance(PhaseEvent::kRetire);
    it = slots_.erase(it);
  }
  StepSlot& slot = *slots_
                        .emplace(step, std::make_shared<StepSlot>(step, mode, StatisticsContributors(session_->spec),
                                                                  GradientContributorsOf(session_->spec, layer_)))
                        .first->second;
  CountWhoHasBegunLater(slot);
  return slot;
}

// --- contributions --------------------------------------------------------------------------------------------------

void LayerPipeline::Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack) {
  Observer& observer = session_->shard->observer;
  const std::string& name = session_->spec.name;
  if (!taken.ok()) {
    observer.OnRejected(name, kind, GetErrorReason(taken.status()));
    MutexLock lock(mu_);
    ++stats_.rejected;
  } else if (*taken) {
    observer.OnDuplicate(name, kind);
  } else {
    observer.OnContribution(name, kind, bytes);
  }
  ack(std::move(taken));
}

void LayerPipeline::SubmitStatistics(const ContributionHeader& header, Payload payload, const AckFn& ack) {
  const uint64_t digest = Digest(header, payload, /*device_plane=*/false);
  const int64_t bytes = static_cast<int64_t>(payload.size());
  Vote vote{.samples = header.samples};
  Standing standing = Standing::kAbstained;
  absl::Status refusal;
  if (!header.abstain) {
    refusal = CheckStatistics(session_->spec, header, payload, session_->shard->options.max_norm_per_sqrt_element);
    standing = refusal.ok() ? Standing::kVoted : Standing::kRefused;
    vote.scales = {header.tensors[0].scale, header.tensors[1].scale};
    vote.rows = RowsOf(session_->spec, header);
    if (refusal.ok()) vote.bytes = std::move(payload);
  }
  bool work = false;
  std::vector<ResultFn> retired;
  absl::StatusOr<bool> taken = Put(header, standing, digest, std::move(vote), work, retired);
  if (taken.ok() && !refusal.ok()) taken = refusal;
  Acknowledge(header.kind, bytes, std::move(taken), ack);
  for (ResultFn& waiter : retired) waiter(Expired());
  if (work) Schedule();
}

void LayerPipeline::SubmitGradient(const ContributionHeader& header, Payload payload, const AckFn& ack,
                                   ResultFn result) {
  const uint64_t digest = Digest(header, payload, session_->shard->options.device_plane);
  const int64_t bytes = header.on_device == nullptr ? static_cast<int64_t>(payload.size()) : header.on_device->bytes();
  Vote vote{.samples = header.samples};
  Standing standing = Standing::kAbstained;
  absl::Status refusal;
  if (header.kind == ContributionKind::kPull) {
    standing = Standing::kVoted;
  } else if (!header.abstain) {
    refusal = CheckGradient(session_->spec, header, payload);
    standing = refusal.ok() ? Standing::kVoted : Standing::kRefused;
    vote.scales[0] = header.tensors[0].scale;
    if (refusal.ok()) vote.bytes = std::move(payload);
    if (refusal.ok()) vote.on_device = header.on_device;
  }
  bool work = false;
  std::vector<ResultFn> retired;
  absl::StatusOr<bool> taken = Put(header, standing, digest, std::move(vote), work, retired);
  // The first sending is refused; a repetition learns what became of the step.
  if (taken.ok() && !refusal.ok() && !*taken) taken = refusal;
  const bool accepted = taken.ok();
  Acknowledge(header.kind, bytes, std::move(taken), ack);
  for (ResultFn& waiter : retired) waiter(Expired());
  if (accepted) AwaitResult(header.key, std::move(result));
  if (work) Schedule();
}

absl::StatusOr<bool> LayerPipeline::Put(const ContributionHeader& header, Standing standing, uint64_t digest, Vote vote,
                                        bool& work, std::vector<ResultFn>& retired) {
  const bool is_gradient = header.kind != ContributionKind::kStatistics;
  const ContributionKey& key = header.key;
  MutexLock lock(mu_);
  // Also when it is then refused: after steps without a frame two ranks would wait for each other.
  if (key.epoch == epoch_) {
    heard_.insert(key.rank);
    Settle(header.kind, key);
    work = NoteBegun(key, retired);
    work = NoteComing(key) || work;
  }
  if (ComesTooLate(header)) {
    ++stats_.duplicates;
    return true;
  }
  PRECONDOR_RETURN_IF_ERROR(CheckStepLocked(key, header.mode));
  // Methods that need none: taken note of, and nothing else.
  if (!is_gradient && !session_->methods.of(layer_).needs_statistics()) return false;
  StepSlot& slot = OpenSlot(key.step, header.mode, retired);
  Phase& phase = is_gradient ? slot.gradient : slot.statistics;
  if (!is_gradient && slot.restored && phase.state != PhaseState::kOpen) {
    // Whoever was in has been counted; what each sent is not known any more.
    ++stats_.duplicates;
    return true;
  }
  if (phase.state != PhaseState::kOpen && !phase.gather.has(key.rank)) {
    return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                          absl::StrCat(DescribeKey(session_->spec, key), ": sealed without this rank at its deadline"));
  }
  switch (phase.gather.Put(key.rank, standing, digest, std::move(vote))) {
    case PutOutcome::kDuplicate:
      ++stats_.duplicates;
      return true;
    case PutOutcome::kConflict:
      return ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kConflict,
                            absl::StrCat(DescribeKey(session_->spec, key), ": other bytes under the key of an earlier ",
                                         is_gradient ? "gradient" : "statistics"));
    case PutOutcome::kTaken:
      break;
  }
  if (standing != Standing::kRefused) ++stats_.accepted;
  RaiseTo(session_->last_step, key.step);
  if (header.mode == Mode::kFirstOrder) RaiseTo(session_->after_last_first_order, key.step + 1);
  if (is_gradient) {
    ++slot.in_flight;
    session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
    // One rank without a gradient and everybody skips: the others' bytes are of no use.
    if (phase.gather.abstained() > 0) phase.gather.DropVotes();
  }
  SealIfDue(slot, header.kind, session_->shard->clock.Now());
  work = work || is_gradient || phase.state == PhaseState::kSealed;
  return false;
}

void LayerPipeline::Settle(ContributionKind kind, const ContributionKey& key) {
  for (const auto& [step, slot] : slots_) {
    // Whoever sends anything of a later step has this one's answer; an acknowledgement that is lost does no harm.
    if (step < key.step) slot->gradient.gather.Settle(key.rank);
    if (kind == ContributionKind::kStatistics && step <= key.step) slot->statistics.gather.Settle(key.rank);
  }
}

void LayerPipeline::SealIfDue(StepSlot& slot, ContributionKind kind, absl::Time now) {
  const bool is_gradient = kind != ContributionKind::kStatistics;
  Phase& phase = is_gradient ? slot.gradient : slot.statistics;
  phase.opened_at = std::min(phase.opened_at, now);
  SealingInput input{.members = phase.gather.count(),
                     .voted = phase.gather.voted(),
                     .abstained = phase.gather.abstained(),
                     .quorum = session_->shard->options.quorum};
  if (!is_gradient && slot.gradient.state != PhaseState::kOpen) {
    input.deadline = session_->shard->options.statistics_deadline;
    input.waited = now - slot.gradient.sealed_at;
  }
  const SealingDecision decision = DecideSealing(input);
  if (decision.verdict == SealingVerdict::kWait) return;
  phase.skip = decision.verdict == SealingVerdict::kSkip || (!is_gradient && slot.incomplete);
  phase.sealed_at = now;
  phase.Advance(PhaseEvent::kSeal);
  if (!is_gradient) {
    ++slot.in_flight;
    session_->shard->in_flight.fetch_add(1, std::memory_order_relaxed);
  }
  stats_.last_sealed_step = std::max(stats_.last_sealed_step, slot.step);
  session_->shard->observer.OnSealed(session_->spec.name, kind, now - phase.opened_at);
  if (phase.gather.voted() + phase.gather.abstained() < phase.gather.count()) {
    session_->shard->logger.Log(
        Severity::kWarning, "statistics sealed without everybody",
        {{"session", session_->spec.name}, {"step", slot.step}, {"layer", stats_.name}, {"reason", decision.reason}});
  }
}

void LayerPipeline::SealOverdue(absl::Time now) {
  bool sealed = false;
  {
    MutexLock lock(mu_);
    for (const auto& [step, slot] : slots_) {
      if (!ExpectsStatistics(*slot) || slot->statistics.state != PhaseState::kOpen) continue;
      // Answered already where statistics follow the gradient (staleness_steps): they block the next step's.
      const PhaseState gradient = slot->gradient.state;
      if (gradient != PhaseState::kSealed && gradient != PhaseState::kApplied) continue;
      SealIfDue(*slot, ContributionKind::kStatistics, now);
      sealed = sealed || slot->statistics.state == PhaseState::kSealed;
    }
  }
  if (sealed) Schedule();
}

void LayerPipeline::AwaitResult(const ContributionKey& key, ResultFn result) {
  absl::StatusOr<GradientResult> answer = absl::UnknownError("");
  {
    MutexLock lock(mu_);
    const auto found = key.epoch == epoch_ ? slots_.find(key.step) : slots_.end();
    if (key.epoch != epoch_) {
      answer = ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch,
                              absl::StrCat(DescribeKey(session_->spec, key), ": epoch ", key.epoch, " has ended"));
    } else if (found == slots_.end() || found->second->gradient.state == PhaseState::kRetired) {
      answer = ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                              absl::StrCat(DescribeKey(session_->spec, key), ": retired"));
    } else if (found->second->result.has_value()) {
      answer = *found->second->result;
    } else {
      found->second->waiters.push_back(std::move(result));
      return;
    }
  }
  if (answer.ok()) {
    session_->shard->observer.OnResult(session_->spec.name, answer->decision, answer->payload_bytes());
  }
  result(std::move(answer));
}

void LayerPipeline::Drop(const std::shared_ptr<StepSlot>& dropped) {
  StepSlot& slot = *dropped;
  const bool owed = slot.restored_votes.has_value() && slot.statistics.state == PhaseState::kSealed;
  if (owed) owed_updates_.push_back(dropped);
  slot.statistics.Advance(PhaseEvent::kRetire);
  slot.gradient.Advance(PhaseEvent::kRetire);
  session_->shard->in_flight.fetch_sub(std::exchange(slot.in_flight, 0), std::memory_order_relaxed);
}

void LayerPipeline::DropSlots(std::vector<ResultFn>& waiters) {
  for (const auto& [step, slot] : slots_) {
    std::move(slot->waiters.begin(), slot->waiters.end(), std::back_inserter(waiters));
    slot->waiters.clear();
    Drop(slot);
  }
  slots_.clear();
}

uint64_t LayerPipeline::EndEpoch(uint64_t epoch, const absl::Status& why) {
  std::vector<ResultFn> waiters;
  uint64_t floor = 0;
  {
    MutexLock lock(mu_);
    floor = std::max(floor_, opens_from_);
    for (const auto& [step, slot] : slots_) {
      // Passed over: what a process that begins with it would need is gone.
      if (slot->gradient.state == PhaseState::kRetired) floor = std::max(floor, step + 1);
      // Factors go one way: those from before a step that has been sealed are not to be had for long.
      const bool sealed =
          slot->statistics.state == PhaseState::kSealed || slot->statistics.state == PhaseState::kApplied;
      if (WorkersPrecondition(session_->spec) && sealed) floor = std::max(floor, step);
    }
    if (epoch <= epoch_) return floor;
    epoch_ = epoch;
    for (const auto& [step, slot] : slots_) {
      std::move(slot->waiters.begin(), slot->waiters.end(), std::back_inserter(waiters));
      slot->waiters.clear();
    }
  }
  for (ResultFn& waiter : waiters) waiter(why);
  return floor;
}

void LayerPipeline::BeginEpoch(uint64_t epoch, std::optional<uint64_t> goes_back_to,
                               absl::Span<const Member> replaced) {
  std::vector<ResultFn> retired;
  bool work = false;
  {
    MutexLock lock(mu_);
    if (epoch != epoch_) return;
    if (goes_back_to.has_value()) {
      DropSlots(retired);
      floor_ = opens_from_ = *goes_back_to;
      began_ = epoch;
      to_begin_.clear();
      coming_.clear();
      disowned_.clear();
    } else {
      for (const auto& [step, slot] : slots_) slot->Inherit(replaced);
      for (const Member& member : replaced) {
        if (member.first_step > 0) to_begin_.insert(member.rank);
        if (WorkersPrecondition(session_->spec)) {
          coming_[member.rank] = {.first_step = member.first_step, .step = member.first_step};
        }
        disowned_.erase(member.rank);
      }
    }
    // What waited for a rank's predecessor may not have to wait for it.
    work = !owed_updates_.empty() || std::any_of(slots_.begin(), slots_.end(), [](const auto& slot) {
      return !slot.second->restored && slot.second->statistics.state == PhaseState::kSealed;
    });
  }
  for (ResultFn& waiter : retired) waiter(Expired());
  if (work) Schedule();
}

absl::Status LayerPipeline::Resume(const ContributionKey& key, uint64_t factor_version) {
  std::vector<ResultFn> retired;
  absl::Status status;
  bool work = false;
  uint64_t known = 0;
  uint64_t lost = 0;
  {
    MutexLock lock(mu_);
    PRECONDOR_RETURN_IF_ERROR(CheckEpoch(key));
    // From a stream that broke long ago; or others have gone on before this rank came back.
    if (!heard_.insert(key.rank).second && key.step < floor_) return absl::OkStatus();
    known = stats_.factor_version + restored_updates_;
    if (held_ && factor_version > known) lost = factor_version - known;
    if (lost > 0 && !one_answer() && disowned_.empty()) {
      for (int32_t rank = 0; rank < session_->spec.world_size; ++rank) disowned_.insert(rank);
      DropSlots(retired);
      floor_ = opens_from_ = 0;
    }
    to_begin_.erase(key.rank);
    work = NoteComing(key);
    status = CheckMemory(key);
    if (status.ok()) work = PassOver(key.rank, key.step, /*resumes=*/true, retired) || work;
  }
  for (ResultFn& waiter : retired) waiter(status.ok() ? Expired() : status);
  if (work) Schedule();
  if (lost == 0) return status;
  session_->shard->observer.OnUpdatesLost(session_->spec.name, static_cast<int64_t>(lost));
  session_->shard->logger.Log(Severity::kWarning, "factor updates are lost",
                              {{"session", session_->spec.name},
                               {"layer", session_->spec.layers[layer_].name},
                               {"rank", key.rank},
                               {"updates", lost},
                               {"answered_with", factor_version},
                               {"has", known}});
  return status;
}

void LayerPipeline::Fetch(const ContributionKey& key, ResultFn result) {
  absl::Status status;
  bool work = false;
  {
    MutexLock lock(mu_);
    status = CheckEpoch(key);
    // Its step is where the rank begins, and no claim to have come there.
    if (status.ok()) work = NoteComing({.step = 0, .rank = key.rank});
    if (status.ok()) status = CheckMemory(key);
  }
  if (work) Schedule();
  if (!status.ok()) return result(std::move(status));
  ShardContext& shard = *session_->shard;
  shard.in_flight.fetch_add(1, std::memory_order_relaxed);
  executor_.Post(strand_, [self = shared_from_this(), answer = std::move(result)] {
    for (Work& work : self->TakeRestoredUpdates()) self->Update(work);
    absl::StatusOr<GradientResult> fetched = self->worker_.Fetch();
    if (fetched.ok()) {
      const int64_t bytes = fetched->bytes == nullptr ? 0 : static_cast<int64_t>(fetched->bytes->size());
      self->session_->shard->observer.OnFetch(self->session_->spec.name, bytes);
    }
    answer(std::move(fetched));
    self->session_->shard->in_flight.fetch_sub(1, std::memory_order_relaxed);
  });
}

void LayerPipeline::Close(const absl::Status& why) {
  std::vector<ResultFn> waiters;
  {
    MutexLock lock(mu_);
    // No epoch comes after this one: what still arrives is stale.
    epoch_ = std::numeric_limits<uint64_t>::max();
    DropSlots(waiters);
    owed_updates_.clear();
  }
  for (ResultFn& waiter : waiters) waiter(why);
}

}  // namespace precondor
