// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan_report.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_render.h"

namespace precondor {
namespace {

std::string Bytes(double bytes) { return FormatBytes(static_cast<uint64_t>(bytes)); }

std::string Count(double value) {
  if (value >= 1e12) return absl::StrFormat("%.2f T", value / 1e12);
  if (value >= 1e9) return absl::StrFormat("%.2f G", value / 1e9);
  return absl::StrFormat("%.2f M", value / 1e6);
}

std::string Seconds(double seconds) {
  return seconds < 1 ? absl::StrFormat("%.3g ms", seconds * 1e3) : absl::StrFormat("%.3g s", seconds);
}

// Returns the shard that reserves most, which decides whether a session fits.
ShardLoad Fullest(const Plan& plan) {
  return *std::max_element(plan.shards.begin(), plan.shards.end(),
                           [](const ShardLoad& x, const ShardLoad& y) { return x.reserved() < y.reserved(); });
}

std::string SessionText(const SessionSpec& spec) {
  std::string text = spec.method.name;
  for (const auto& [name, value] : spec.method.options) {
    absl::StrAppend(&text, " ", name, "=");
    if (const double* number = std::get_if<double>(&value)) absl::StrAppend(&text, *number);
    if (const bool* flag = std::get_if<bool>(&value)) absl::StrAppend(&text, *flag ? "true" : "false");
    if (const auto* words = std::get_if<std::string>(&value)) absl::StrAppend(&text, *words);
  }
  return absl::StrCat(text, ", ", ExchangeModeName(spec.exchange), ", ", spec.world_size, " workers, statistics ",
                      StatisticsKindName(spec.statistics), " every ", spec.inv_freq, " steps");
}

// Returns text like "an average step: every step gradients 24.0 MiB, every 10 steps statistics 864.3 KiB". Parts that
// are 0 are left out.
std::string TrafficText(const char* each_step, int64_t each_step_bytes, const SessionSpec& spec,
                        const char* statistic_step, int64_t statistic_step_bytes) {
  std::vector<std::string> parts;
  if (each_step_bytes > 0) parts.push_back(absl::StrCat("every step ", each_step, " ", Bytes(each_step_bytes)));
  if (statistic_step_bytes > 0) {
    parts.push_back(absl::StrCat("every ", spec.inv_freq, " steps ", statistic_step, " ", Bytes(statistic_step_bytes)));
  }
  return parts.empty() ? "nothing" : absl::StrCat("an average step: ", absl::StrJoin(parts, ", "));
}

void AddShards(const PlanInput& input, const Plan& plan, std::vector<std::vector<std::string>>& rows) {
  const ShardLoad fullest = Fullest(plan);
  rows.push_back({"shards", absl::StrCat(plan.shards.size(), " of ", Bytes(input.shard_memory_bytes)),
                  plan.fits ? "the session fits" : "THE SESSION DOES NOT FIT"});
  rows.push_back({"reserved by the fullest shard", Bytes(fullest.reserved()),
                  absl::StrCat("states ", Bytes(fullest.states), ", staging ", Bytes(fullest.staging), ", scratch ",
                               Bytes(fullest.scratch))});
  rows.push_back({"imbalance", absl::StrFormat("%.2f", plan.imbalance), "work of the busiest shard over the mean"});
  rows.push_back({"network", Seconds(plan.network_seconds),
                  absl::StrFormat("a step at %g Gbit/s, at the busiest %s", input.network_gbps,
                                  plan.network_at_shard ? "shard" : "worker")});
  if (input.device_tflops <= 0) return;
  const std::string rate = absl::StrFormat("a step at %g TFLOP/s, ", input.device_tflops);
  rows.push_back({"arithmetic of a shard", Seconds(plan.shard_seconds), rate + "the busiest shard"});
  if (plan.worker_seconds > 0) {
    rows.push_back({"arithmetic of a worker", Seconds(plan.worker_seconds), rate + "every worker"});
  }
}

}  // namespace

std::string PlanTable(const ModelShapes& model, const PlanInput& input, const Plan& plan) {
  const SessionSpec& spec = input.spec;
  const WorkerTraffic& worker = plan.worker;
  std::vector<std::vector<std::string>> rows = {{"WHAT", "VALUE", "OF WHICH"}};
  rows.push_back({"model", model.name, SessionText(spec)});
  rows.push_back({"layers", absl::StrCat(spec.layers.size()),
                  model.left_out.empty() ? "-" : absl::StrCat("left to the optimizer: ", model.left_out)});
  rows.push_back({"parameters", Count(static_cast<double>(plan.parameters)), "of these layers, with folded biases"});
  rows.push_back({"factors", Bytes(plan.state_bytes), "of all layers, at their fullest"});
  rows.push_back({"a worker sends", Bytes(plan.worker_sent),
                  TrafficText("gradients", worker.gradients_sent, spec, "statistics", worker.statistics_sent)});
  const bool replays = spec.exchange == ExchangeMode::kReplay;
  rows.push_back({"a worker receives", Bytes(plan.worker_received),
                  TrafficText("answers", worker.answers_received, spec, replays ? "merged vectors" : "factors, at most",
                              worker.factors_received)});
  rows.push_back({"precondition", Count(plan.precondition_flops) + "FLOP", "a step, all layers"});
  rows.push_back({"update", Count(plan.update_flops) + "FLOP", "a statistic step, all layers"});
  rows.push_back({"shards needed by memory", plan.shards_by_memory > 0 ? absl::StrCat(plan.shards_by_memory) : "-",
                  absl::StrCat("of ", Bytes(input.shard_memory_bytes), " each")});
  if (!plan.shards.empty()) AddShards(input, plan, rows);
  std::string table = FormatTable(rows);
  if (!plan.fits) absl::StrAppend(&table, "does not fit: ", plan.reason, "\n");
  return table;
}

nlohmann::json PlanJson(const ModelShapes& model, const PlanInput& input, const Plan& plan) {
  nlohmann::json shards = nlohmann::json::array();
  for (const ShardLoad& shard : plan.shards) {
    shards.push_back({{"layers", shard.layers},
                      {"state_bytes", shard.states},
                      {"staging_bytes", shard.staging},
                      {"scratch_bytes", shard.scratch},
                      {"received_bytes_per_step", shard.received},
                      {"sent_bytes_per_step", shard.sent},
                      {"flops_per_step", shard.step_flops}});
  }
  nlohmann::json document = {{"model", model.name},
                             {"left_out", model.left_out},
                             {"layers", input.spec.layers.size()},
                             {"parameters", plan.parameters},
                             {"state_bytes", plan.state_bytes},
                             {"worker_gradient_bytes_sent", plan.worker.gradients_sent},
                             {"worker_statistics_bytes_sent", plan.worker.statistics_sent},
                             {"worker_answer_bytes_received", plan.worker.answers_received},
                             {"worker_factor_bytes_received", plan.worker.factors_received},
                             {"worker_bytes_sent_per_step", plan.worker_sent},
                             {"worker_bytes_received_per_step", plan.worker_received},
                             {"precondition_flops", plan.precondition_flops},
                             {"update_flops", plan.update_flops},
                             {"shards_by_memory", plan.shards_by_memory},
                             {"fits", plan.fits},
                             {"reason", plan.reason},
                             {"imbalance", plan.imbalance},
                             {"network_seconds_per_step", plan.network_seconds},
                             {"network_at", plan.network_at_shard ? "shard" : "worker"},
                             {"shards", std::move(shards)}};
  if (input.device_tflops > 0) {
    document["shard_seconds_per_step"] = plan.shard_seconds;
    document["worker_seconds_per_step"] = plan.worker_seconds;
  }
  return document;
}

}  // namespace precondor
