// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator_context.h"

#include <utility>

#include "server/core/coordinator/leader_calls.h"

namespace precondor {

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
