// SPDX-License-Identifier: Apache-2.0
#include "server/http/status_pages.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace precondor {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinity.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// Returns null for nullopt.
Json SecondsSince(std::optional<absl::Time> since, absl::Time now) {
  return since.has_value() ? Json(absl::ToInt64Seconds(now - *since)) : Json(nullptr);
}

Json SessionObject(const SessionSpec& spec, uint64_t epoch, uint32_t joined, Mode mode) {
  return {{"train_job", spec.name},
          {"epoch", epoch},
          {"joined", joined},
          {"world_size", spec.world_size},
          {"mode", std::string(ModeName(mode))}};
}

// At most 16: a job can have thousands of ranks.
Json FirstRanks(const std::vector<uint32_t>& ranks) {
  constexpr size_t kShown = 16;
  return std::vector<uint32_t>(ranks.begin(), ranks.begin() + std::min(ranks.size(), kShown));
}

Json CoordinatorObject(const CoordinatorSessionSummary& session) {
  Json last_snapshot = nullptr;
  for (const SnapshotEntry& snapshot : session.snapshots) {
    if (snapshot.state == SnapshotState::kComplete) last_snapshot = snapshot.step;
  }
  const LossTrend& trend = session.decision.state.trend;
  Json shard_steps = Json::array();
  for (const auto& [address, step] : session.shard_steps) {
    shard_steps.push_back({{"shard", address}, {"last_step", step}});
  }
  return {{"last_step", session.last_step},      {"shard_steps", std::move(shard_steps)},
          {"loss", Number(session.loss)},        {"smoothed_loss", Number(trend.loss)},
          {"loss_rate", Number(trend.rate)},     {"rule", std::string(FallbackReasonName(session.decision.reason))},
          {"reason", session.decision.sentence}, {"last_snapshot_step", std::move(last_snapshot)}};
}

}  // namespace

std::string StatusPage(const StatusSubject& subject) {
  std::map<std::string, Json> sessions;
  Json shards = Json::array();
  if (subject.shard != nullptr) {
    for (const ShardSessionSummary& session : subject.shard->ListSessions()) {
      Json& object = sessions[session.spec.name];
      object = SessionObject(session.spec, session.epoch, session.joined, session.mode);
      object["shard"] = {{"last_step", session.last_step},
                         {"reserved_bytes", session.reserved_bytes},
                         {"updates_lost", session.updates_lost},
                         {"lacks_gradients_for_s", SecondsSince(session.lacks_gradients_since, subject.now)},
                         {"lagging_workers", session.lagging_ranks.size()},
                         {"lagging_ranks", FirstRanks(session.lagging_ranks)}};
    }
  }
  if (subject.coordinator != nullptr) {
    for (const CoordinatorSessionSummary& session : subject.coordinator->ListSessions()) {
      Json& object = sessions[session.spec.name];
      Json seen = SessionObject(session.spec, session.epoch, session.joined, session.mode);
      if (object.contains("shard")) seen["shard"] = object["shard"];
      seen["coordinator"] = CoordinatorObject(session);
      object = std::move(seen);
    }
    for (const std::string& address : subject.coordinator->ShardAddresses()) shards.push_back(address);
  }
  Json objects = Json::array();
  for (auto& [name, object] : sessions) objects.push_back(std::move(object));
  const Json page = {{"version", std::string(subject.version)},
                     {"role", std::string(subject.role)},
                     {"draining", subject.draining},
                     {"shards", std::move(shards)},
                     {"sessions", std::move(objects)}};
  // In ASCII, since a terminal may show it.
  return page.dump(/*indent=*/1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + "\n";
}

}  // namespace precondor
