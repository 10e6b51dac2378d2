// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_upkeep.h"

#include <atomic>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "server/core/shard/shard_session.h"

namespace precondor {
namespace {

bool LearnsFromGradients(ShardSession& session) {
  return absl::c_all_of(session.owned(),
                        [&](uint32_t layer) { return session.context().methods.of(layer).learns_from_gradients(); });
}

}  // namespace

void ShardUpkeep::ReportStragglers() {
  if (shard_.options.slow_worker == absl::InfiniteDuration()) return;
  const absl::Time since = shard_.clock.Now() - shard_.options.slow_worker;
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) session->ReportStragglers(since);
}

std::vector<std::string> ShardUpkeep::WriteFinalSnapshots(absl::Time deadline) {
  ShardJournal* const journal = shard_.options.journal;
  if (journal == nullptr) return {};
  // A snapshot in progress would displace the final one.
  journal->FinishSnapshots(deadline);
  const std::shared_ptr<const std::atomic<size_t>> left = GiveFinalImages();
  while (*left > 0 && shard_.clock.Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  journal->FinishSnapshots(deadline);
  return FindIncomplete();
}

std::shared_ptr<const std::atomic<size_t>> ShardUpkeep::GiveFinalImages() {
  // The layers' tasks may outlive the caller.
  auto left = std::make_shared<std::atomic<size_t>>(0);
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) {
    // Amid a step, factors made of statistics may be past those that a rank asks for again. Their journal is exact if
    // it lacks nothing.
    const bool whole = shard_.options.journal->HoldsAllOf(session->context().session_id);
    if (whole && !LearnsFromGradients(*session)) continue;
    const uint64_t step = session->context().begun_steps.last().step + 1;
    left->fetch_add(session->owned().size());
    for (const uint32_t layer : session->owned()) session->layer(layer)->GiveFinalImage(step, [left] { --*left; });
  }
  return left;
}

std::vector<std::string> ShardUpkeep::FindIncomplete() const {
  std::vector<std::string> lost;
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) {
    const bool whole = shard_.options.journal->HoldsAllOf(session->context().session_id);
    if (!whole) lost.push_back(session->spec().name);
  }
  return lost;
}

bool ShardUpkeep::LostDevice() {
  const DeviceUse device = DescribeDevice(shard_);
  if (device.fault.empty()) return false;
  if (!lost_.exchange(true)) {
    shard_.observer.OnDevice(device.name, false);
    shard_.logger.Log(Severity::kError, "device lost", {{"device", device.name}, {"reason", device.fault}});
  }
  return true;
}

}  // namespace precondor
