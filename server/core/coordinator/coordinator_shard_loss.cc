// SPDX-License-Identifier: Apache-2.0
// Moves layers of sessions with on_shard_loss DEGRADE away from lost shards: they begin with fresh factors on the
// remaining shards, in a new epoch, and are not moved back. Sessions with WAIT stay as they are.
#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/placement_input.h"
#include "server/policy/placement.h"

namespace precondor {
namespace {

// Returns the layers on lost shards, ascending.
std::vector<uint32_t> LostLayers(const std::vector<PlacedLayers>& placement, const std::vector<bool>& lost) {
  std::vector<uint32_t> layers;
  for (size_t s = 0; s < placement.size(); ++s) {
    if (lost[s]) layers.insert(layers.end(), placement[s].layers.begin(), placement[s].layers.end());
  }
  absl::c_sort(layers);
  return layers;
}

// Returns the names of the first few layers, and how many more there are.
std::string LayerNames(const SessionSpec& spec, const std::vector<uint32_t>& layers) {
  constexpr size_t kNamed = 8;
  std::vector<absl::string_view> names;
  for (size_t i = 0; i < std::min(kNamed, layers.size()); ++i) names.push_back(spec.layers[layers[i]].name);
  return absl::StrCat(absl::StrJoin(names, ","),
                      layers.size() > kNamed ? absl::StrCat(" and ", layers.size() - kNamed, " more") : "");
}

}  // namespace

void Coordinator::ReplaceLostShards(const std::vector<std::optional<ShardDescription>>& shards) {
  std::vector<bool> lost(shards.size(), false);
  for (size_t s = 0; s < shards.size(); ++s) lost[s] = !shards[s].has_value() && watch_.IsLost(s, clock_.Now());
  std::vector<std::string> names;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_.by_id()) {
      if (session->spec().on_shard_loss != ShardLossPolicy::kDegrade) continue;
      if (!LostLayers(session->placement().shards(), lost).empty()) names.push_back(session->spec().name);
    }
  }
  absl::c_sort(names);
  for (const std::string& name : names) MoveLayers(name, lost, shards);
}

absl::StatusOr<std::vector<PlacedLayers>> Coordinator::MakeMove(
    const CoordinatorSession& session, const std::vector<uint32_t>& layers,
    const std::vector<std::optional<ShardDescription>>& shards) const {
  const SessionSpec& spec = session.spec();
  PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(spec, options_.make_method));
  std::vector<std::optional<ShardDescription>> rooms = shards;
  std::vector<MeasuredCost> costs;
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (!rooms[s].has_value()) continue;
    // Other sessions may have reserved memory since the description was made.
    absl::StatusOr<ShardDescription> now = shards_[s].control->Probe({});
    rooms[s] = now.ok() ? std::make_optional(*std::move(now)) : std::nullopt;
    if (rooms[s].has_value()) costs.insert(costs.end(), rooms[s]->costs.begin(), rooms[s]->costs.end());
  }
  const std::vector<PlacementLayer> estimates = EstimateLayers(spec, methods, costs);
  std::vector<PlacedLayers> placement = session.placement().shards();
  for (PlacedLayers& placed : placement) {
    std::erase_if(placed.layers, [&](uint32_t layer) { return absl::c_binary_search(layers, layer); });
  }
  std::vector<PlacementLayer> moved;
  moved.reserve(layers.size());
  for (const uint32_t layer : layers) moved.push_back(estimates[layer]);
  std::vector<PlacementShard> free_rooms;
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (!rooms[s].has_value()) continue;
    double load = 0;
    for (const uint32_t layer : placement[s].layers) load += estimates[layer].cost;
    absl::c_copy(DeviceRooms(*rooms[s], load, s), std::back_inserter(free_rooms));
  }
  const Placement chosen = PlaceLayers(moved, free_rooms);
  if (!chosen.feasible)
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity, chosen.reason);
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t s = free_rooms[chosen.shard_of_layer[i]].shard;
    placement[s].layers.push_back(layers[i]);
    placement[s].address = rooms[s]->advertise_address.empty() ? shards_[s].address : rooms[s]->advertise_address;
  }
  for (PlacedLayers& placed : placement) absl::c_sort(placed.layers);
  return placement;
}

absl::StatusOr<uint64_t> Coordinator::WriteMove(CoordinatorSession& session,
                                                const std::vector<PlacedLayers>& placement) {
  uint64_t epoch = 0;
  // The record has the whole session; no lease can be written while it is made.
  PRECONDOR_RETURN_IF_ERROR(WriteChange(session, [&] {
    SessionRecord moved = session.PlanMove(placement);
    epoch = moved.membership.epoch;
    return moved;
  }));
  return epoch;
}

void Coordinator::MoveLayers(const std::string& name, const std::vector<bool>& lost,
                             const std::vector<std::optional<ShardDescription>>& shards) {
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr) return;
  CoordinatorSession& session = *locked.state();
  const std::vector<uint32_t> layers = LostLayers(session.placement().shards(), lost);
  if (layers.empty() || session.spec().on_shard_loss != ShardLossPolicy::kDegrade) return;
  std::vector<std::string> lost_names;
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (lost[s] && !session.placement().shards()[s].layers.empty()) lost_names.push_back(shards_[s].address);
  }
  const std::string from = absl::StrJoin(lost_names, ",");
  // A shard that refuses layers although it seemed to have room gets no more of them: each round has one candidate
  // less.
  std::vector<std::optional<ShardDescription>> candidates = shards;
  std::vector<uint32_t> unplaced = layers;
  for (bool first = true;; first = false) {
    const absl::StatusOr<std::vector<PlacedLayers>> placement = MakeMove(session, unplaced, candidates);
    const absl::StatusOr<uint64_t> epoch = placement.ok() ? WriteMove(session, *placement) : placement.status();
    if (!epoch.ok()) {
      logger_.Log(Severity::kWarning,
                  first ? "layers not moved; the session waits for their shard"
                        : "moved layers refused everywhere; the session waits for room",
                  {{"session", name},
                   {"session_id", session.id()},
                   {"shard", from},
                   {"layers", static_cast<uint64_t>(unplaced.size())},
                   {"reason", absl::string_view(epoch.status().message())}});
      return;
    }
    if (first) observer_.OnLayersMoved(name, static_cast<int64_t>(layers.size()));
    logger_.Log(
        Severity::kWarning, "layers moved",
        {{"session", name},
         {"session_id", session.id()},
         {"shard", from},
         {"layers", static_cast<uint64_t>(unplaced.size())},
         {"names", LayerNames(session.spec(), unplaced)},
         {"epoch", *epoch},
         {"reason", absl::StrCat("probes not answered for ", absl::FormatDuration(options_.shard_loss_timeout))}});
    std::optional<size_t> refused_by;
    const absl::Status told = TellShards(session, &refused_by);
    if (told.ok()) return;
    logger_.Log(Severity::kWarning, "moved layers not installed yet; tried again",
                {{"session", name}, {"session_id", session.id()}, {"reason", absl::string_view(told.message())}});
    // A shard that does not answer is asked again by Reconcile, or is lost later.
    if (!refused_by.has_value() || absl::IsUnavailable(told) || !candidates[*refused_by].has_value()) return;
    candidates[*refused_by] = std::nullopt;
    std::erase_if(unplaced, [&](uint32_t layer) {
      return !absl::c_binary_search(session.placement().shards()[*refused_by].layers, layer);
    });
    if (unplaced.empty()) return;
  }
}

}  // namespace precondor
