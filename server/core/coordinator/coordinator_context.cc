// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator_context.h"

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/error_reason.h"
#include "server/core/api/shard_control.h"

namespace precondor {
namespace {

// Wraps a coordinator's calls to one shard, and stops them when the shard reports that another coordinator has taken
// over. As thread-safe as the wrapped control.
class LeaderCalls final : public ShardControl {
 public:
  // Makes no more calls once `replaced` is true. Passes each STALE_LEADER refusal to `on_refused`. `replaced`, and what
  // `on_refused` refers to, must outlive the object.
  LeaderCalls(std::unique_ptr<ShardControl> shard, const std::atomic<bool>& replaced,
              std::function<void(const absl::Status&)> on_refused)
      : shard_(std::move(shard)), replaced_(replaced), on_refused_(std::move(on_refused)) {}

  void BecomeLeader(uint64_t token) override { shard_->BecomeLeader(token); }
  std::string own_address() const override { return shard_->own_address(); }
  absl::StatusOr<ShardDescription> Describe() override {
    return Call([&] { return shard_->Describe(); });
  }
  absl::StatusOr<ShardDescription> Probe() override {
    return Call([&] { return shard_->Probe(); });
  }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override {
    return Call([&] { return shard_->Install(install); });
  }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    return Call([&] { return shard_->Fence(fence); });
  }
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override {
    return Call([&] { return shard_->TakeSnapshot(order); });
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) override {
    return Call([&] { return shard_->Remove(session_id); });
  }
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override {
    return Call([&] { return shard_->Quarantine(session_id); });
  }
  void CancelCalls() override { shard_->CancelCalls(); }

 private:
  static const absl::Status& StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }
  // UNAVAILABLE makes workers ask again, and they may then reach the coordinator that leads.
  static absl::Status Replaced() { return absl::UnavailableError("another coordinator has taken over"); }

  template <typename Make>
  auto Call(const Make& make) -> decltype(make()) {
    if (replaced_.load()) return Replaced();
    auto result = make();
    if (GetErrorReason(StatusOf(result)) != ErrorReason::kStaleLeader) return result;
    on_refused_(StatusOf(result));
    return Replaced();
  }

  const std::unique_ptr<ShardControl> shard_;
  const std::atomic<bool>& replaced_;
  const std::function<void(const absl::Status&)> on_refused_;
};

}  // namespace

CoordinatorContext::CoordinatorContext(CoordinatorOptions coordinator_options, std::vector<ShardEndpoint> endpoints,
                                       CoordinatorJournal& coordinator_journal, const Clock& monotonic, Logger& lines,
                                       Observer& events)
    : options(std::move(coordinator_options)),
      shards(Watched(std::move(endpoints))),
      clock(monotonic),
      logger(lines),
      observer(events),
      journal(
          coordinator_journal,
          [this] {
            MutexLock lock(mu);
            return state.Records();
          },
          logger, observer),
      watch(shards.size(), options.probe_interval, clock.Now()) {
  MutexLock lock(mu);
  state.leads = !options.standby;
}

std::vector<ShardEndpoint> CoordinatorContext::Watched(std::vector<ShardEndpoint> endpoints) {
  for (ShardEndpoint& shard : endpoints) {
    shard.control = std::make_unique<LeaderCalls>(std::move(shard.control), replaced,
                                                  [this](const absl::Status& why) { StepDown(why); });
  }
  return endpoints;
}

void CoordinatorContext::StepDown(const absl::Status& why) {
  if (replaced.exchange(true)) return;
  {
    MutexLock lock(mu);
    state.leads = false;
  }
  logger.Log(Severity::kError, "another coordinator has taken over; this one calls no shard any more",
             {{"reason", absl::string_view(why.message())}});
  if (options.on_replaced) options.on_replaced(why);
}

// The errors have no reason code: clients ask again, and may then reach the coordinator that leads.
absl::Status CoordinatorContext::CheckLeads() const {
  if (replaced.load()) return absl::UnavailableError("another coordinator has taken over");
  MutexLock lock(mu);
  if (state.leads) return absl::OkStatus();
  return absl::UnavailableError("this coordinator stands by and does not lead; its log says what it waits for");
}

std::shared_ptr<CoordinatorSession> CoordinatorContext::Find(uint64_t session_id) const {
  MutexLock lock(mu);
  return state.Find(session_id);
}

absl::Status CoordinatorContext::Write(CoordinatorSession& session, const CoordinatorRecord& record) {
  absl::Status written = journal.Write(record, [&] {
    MutexLock lock(mu);
    session.Adopt(record);
  });
  if (!written.ok()) {
    MutexLock lock(mu);
    session.NoteInDoubt(record);
  }
  return written;
}

void CoordinatorContext::PublishCount() {
  MutexLock lock(mu);
  observer.OnCoordinatorSessions(static_cast<int64_t>(state.open.size()));
}

SessionLock::SessionLock(CoordinatorContext& c, absl::string_view name, bool opens) : c_(c), name_(name) {
  MutexLock lock(c_.mu);
  while (c_.busy_names.contains(name_)) c_.name_freed.wait(c_.mu);
  session_ = c_.state.FindByName(name_);
  locks_ = opens || session_ != nullptr;
  if (locks_) c_.busy_names.insert(name_);
}

SessionLock::~SessionLock() {
  if (!locks_) return;
  {
    MutexLock lock(c_.mu);
    c_.busy_names.erase(name_);
  }
  c_.name_freed.notify_all();
}

}  // namespace precondor
