// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan_command.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_render.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"

namespace precondor {
namespace {

absl::Status Wrong(absl::string_view name, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": expected ", expected, ", got \"", got, "\""));
}

FlagSetter Number(double& out) {
  return [&out](absl::string_view text) { return absl::SimpleAtod(text, &out) && out >= 1e-6 && out <= 1e6; };
}

// Converts numbers and booleans to what the method's parser expects. Other text is returned unchanged, and the parser
// reports what is wrong with it.
OptionValue ValueOf(OptionType type, const std::string& text) {
  double number = 0;
  bool flag = false;
  if ((type == OptionType::kNumber || type == OptionType::kInteger) && absl::SimpleAtod(text, &number)) return number;
  if (type == OptionType::kFlag && absl::SimpleAtob(text, &flag)) return flag;
  return text;
}

absl::Status ReadMethod(const PlanOptions& options, MethodConfig& method) {
  const absl::StatusOr<std::vector<OptionInfo>> known = MethodOptions(method.name);
  if (!known.ok()) return Wrong("method", absl::StrJoin(MethodNames(), ", "), method.name);
  for (const auto& [name, text] : options.method_options) {
    const auto info = std::find_if(known->begin(), known->end(),
                                   [&name = name](const OptionInfo& option) { return option.name == name; });
    if (info == known->end()) return Wrong("option", absl::StrCat("an option of method ", method.name), name);
    method.options[name] = ValueOf(info->type, text);
  }
  return MakeMethod(method).status();
}

// Checks which options exclude each other, before the layers are known.
absl::Status CheckSession(SessionSpec spec) {
  spec.layers = {{"every layer", 1, 1, false}};
  absl::Status status = ValidateSessionSpec(spec);
  status.Update(MethodSet::Make(spec).status());
  return status.ok() ? status : absl::InvalidArgumentError(absl::StrCat("plan: ", status.message()));
}

absl::Status CheckFile(const PlanOptions& options) {
  if (options.preset.empty() == options.layers_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan: expected one of --preset (", absl::StrJoin(PresetNames(), ", "), ") and --layers"));
  }
  if (options.preset.empty()) return absl::OkStatus();
  const absl::Status known = PresetShapes(options.preset).status();
  return known.ok() ? known : absl::InvalidArgumentError(absl::StrCat("--preset: ", known.message()));
}

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

PlanOptions::PlanOptions() {
  input.spec.name = "plan";
  input.spec.world_size = 8;
  input.spec.gradient_dtype = DType::kF32;
  input.network_gbps = 10;
}

std::vector<Flag> PlanFlags(PlanOptions& options) {
  PlanInput& input = options.input;
  SessionSpec& spec = input.spec;
  const std::string number = "a number, 1e-06 ... 1e+06";
  const auto range = [](int64_t low, int64_t high) { return absl::StrCat("an integer, ", low, " ... ", high); };
  const auto add_option = [&options](absl::string_view text) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    options.method_options[parts.first] = parts.second;
    return absl::StrContains(text, '=') && !parts.first.empty();
  };
  std::vector<Flag> flags = {
      {"preset", Text(options.preset)},
      {"layers", Text(options.layers_file)},
      {"method", Text(spec.method.name)},
      {"option", add_option, "NAME=VALUE"},
      {"scale", Integer(options.expand.scale, 1, kMaxDimension), range(1, kMaxDimension)},
      {"workers", Integer(spec.world_size, 1, kMaxWorldSize), range(1, kMaxWorldSize)},
      {"inv-freq", Integer(spec.inv_freq, 1, 1 << 30), range(1, 1 << 30)},
      {"sketches", Integer(spec.sketches, 0, kMaxSketches), range(0, kMaxSketches)},
      {"shards", Integer(input.shards, 1, kMaxPlanShards), range(1, kMaxPlanShards)},
      {"threads", Integer(input.threads, 1, 100000), range(1, 100000)},
      {"network-gbps", Number(input.network_gbps), number},
      {"device-tflops", Number(input.device_tflops), number},
      {"shard-memory-gib", Number(options.shard_memory_gib), number},
      {"exchange", Choice(spec.exchange, ExchangeMode::kSharded, ExchangeModeName),
       "DIRECT, DELEGATE, SHARDED, REPLAY or PULL_FACTORS"},
      {"statistics", Choice(spec.statistics, StatisticsKind::kCovariance, StatisticsKindName),
       "MEAN, PER_WORKER_MEAN, SIGNED or COVARIANCE"},
      {"statistics-dtype", Choice(spec.statistics_dtype, DType::kBF16, DTypeName), "f32, f16 or bf16"},
      {"gradient-dtype", Choice(spec.gradient_dtype, DType::kBF16, DTypeName), "f32, f16 or bf16"},
  };
  for (Flag& flag : flags) flag.only = "command plan";
  return flags;
}

absl::Status CheckPlan(PlanOptions& options) {
  SessionSpec& spec = options.input.spec;
  options.input.shard_memory_bytes = static_cast<int64_t>(std::floor(options.shard_memory_gib * (int64_t{1} << 30)));
  PRECONDOR_RETURN_IF_ERROR(CheckFile(options));
  PRECONDOR_RETURN_IF_ERROR(ReadMethod(options, spec.method));
  return CheckSession(spec);
}

absl::StatusOr<ModelShapes> PlanShapes(const PlanOptions& options) {
  return options.preset.empty() ? ReadLayerTable(options.layers_file) : PresetShapes(options.preset);
}

absl::string_view PlanHelp() {
  return R"(
Plan: the model
  --preset=NAME  default none
      The layers are those of resnet50, bert-large, gpt2-xl or llama2-7b.
  --layers=FILE  default none
      The layers are those of a JSON file: [{"name": "fc*", "d_out": 4096, "d_in": 1024, "bias": true, "count": 24}]
  --scale=N  default 1
      All dimensions are divided by this number.

Plan: the session
  --workers=N  default 8
      The job has this many ranks.
  --method=NAME  default mkor
      The session has this method.
  --option=NAME=VALUE  default none
      The method has this option. Give the flag once for each option.
  --exchange=DIRECT|DELEGATE|SHARDED|REPLAY|PULL_FACTORS  default DIRECT
      Gradients and factors take this way.
  --statistics=MEAN|PER_WORKER_MEAN|SIGNED|COVARIANCE  default SIGNED
      Workers send statistics of this kind.
  --sketches=N  default 0
      Workers send this many sketches of a covariance.
  --inv-freq=N  default 10
      Workers send statistics every so many steps.
  --statistics-dtype=f32|f16|bf16  default f16
      Statistics have this type on the wire.
  --gradient-dtype=f32|f16|bf16  default f32
      Gradients and answers have this type on the wire.

Plan: the machines
  --network-gbps=X  default 10
      Each machine sends and receives this many gigabits a second.
  --shard-memory-gib=X  default 8
      Each shard has this --memory-limit in GiB.
  --shards=N  default as few as memory allows
      The plan has this many shards.
  --threads=N  default 512
      A shard works on this many layers at once.
  --device-tflops=X  default none
      A shard computes this many 1e12 operations a second. Without it, the plan has no seconds of arithmetic.

Exit status of plan: 0 the session fits; 1 it does not, or a file cannot be read; 2 wrong usage.

Examples of plan, which asks no server
  precondorctl plan --preset=bert-large --workers=64 --exchange=DELEGATE --network-gbps=25 --shard-memory-gib=64
  precondorctl plan --preset=llama2-7b --option=rank=128 --exchange=REPLAY --device-tflops=30
  precondorctl plan --layers=model.json --shards=4 --json | jq .shards_by_memory
)";
}

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
