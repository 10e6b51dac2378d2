// SPDX-License-Identifier: Apache-2.0
#include "server/status_pages.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& json) { return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n"; }

// JSON has no NaN and no infinity.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json LayerObject(const LayerStats& stats) {
  return {
      {"layer", stats.layer},
      {"name", stats.name},
      {"device", stats.device},
      {"factor_version", stats.factor_version},
      {"last_sealed_step", stats.last_sealed_step},
      {"input",
       {{"representation", stats.input_representation},
        {"rank", stats.input_rank},
        {"damping", Number(stats.input_damping)}}},
      {"output",
       {{"representation", stats.output_representation},
        {"rank", stats.output_rank},
        {"damping", Number(stats.output_damping)}}},
      {"failed_decompositions", stats.failed_decompositions},
      {"factor_resets", stats.factor_resets},
      {"state_bytes", stats.state_bytes},
      {"contributions", {{"accepted", stats.accepted}, {"duplicate", stats.duplicates}, {"rejected", stats.rejected}}},
      {"results", {{"preconditioned", stats.preconditioned}, {"identity", stats.identity}, {"skip", stats.skipped}}},
      {"mean_update_seconds", Number(stats.update_seconds)},
      {"mean_precondition_seconds", Number(stats.precondition_seconds)}};
}

}  // namespace

absl::StatusOr<std::string> LayersPage(const Shard* shard, absl::string_view session) {
  Json sessions = Json::array();
  if (shard != nullptr) {
    for (const ShardSessionSummary& summary : shard->ListSessions()) {
      if (!session.empty() && summary.spec.name != session) continue;
      const absl::StatusOr<std::vector<LayerStats>> layers = shard->GetLayerStats(summary.spec.name);
      if (!layers.ok()) continue;  // removed meanwhile
      Json objects = Json::array();
      for (const LayerStats& stats : *layers) objects.push_back(LayerObject(stats));
      sessions.push_back({{"train_job", summary.spec.name}, {"epoch", summary.epoch}, {"layers", std::move(objects)}});
    }
  }
  if (!session.empty() && sessions.empty()) {
    return absl::NotFoundError(absl::StrCat("session \"", session.substr(0, 128), "\" is not on this server"));
  }
  return Dump({{"sessions", std::move(sessions)}});
}

}  // namespace precondor
