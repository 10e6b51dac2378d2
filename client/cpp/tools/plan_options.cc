// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan_options.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"

namespace precondor {
namespace {

constexpr std::array<absl::string_view, 19> kFlags = {
    "preset",   "layers",   "workers",          "method",         "representation",   "rank",         "option",
    "exchange", "inv-freq", "statistics",       "sketches",       "statistics-dtype", "network-gbps", "shards",
    "threads",  "scale",    "shard-memory-gib", "gradient-dtype", "device-tflops"};
constexpr absl::string_view kOption = "option.";
constexpr std::array<ExchangeMode, 5> kExchanges = {ExchangeMode::kDirect, ExchangeMode::kDelegate,
                                                    ExchangeMode::kReplay, ExchangeMode::kPullFactors,
                                                    ExchangeMode::kSharded};
constexpr std::array<StatisticsKind, 4> kStatistics = {StatisticsKind::kMean, StatisticsKind::kPerWorkerMean,
                                                       StatisticsKind::kSigned, StatisticsKind::kCovariance};

absl::Status Wrong(absl::string_view name, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": expected ", expected, ", got \"", got, "\""));
}

// Reads flags into fields and keeps the first error.
class Reader {
 public:
  explicit Reader(const PlanFlags& flags) : flags_(flags) {}

  template <typename T>
  void Integer(const char* name, int64_t low, int64_t high, T& out) {
    const auto found = flags_.find(name);
    if (found == flags_.end()) return;
    int64_t value = 0;
    if (absl::SimpleAtoi(found->second, &value) && value >= low && value <= high) {
      out = static_cast<T>(value);
    } else {
      error_.Update(Wrong(name, absl::StrCat("an integer, ", low, " ... ", high), found->second));
    }
  }
  void Number(const char* name, double low, double high, double& out) {
    const auto found = flags_.find(name);
    if (found == flags_.end()) return;
    double value = 0;
    if (absl::SimpleAtod(found->second, &value) && value >= low && value <= high) {
      out = value;
    } else {
      error_.Update(Wrong(name, absl::StrCat("a number, ", low, " ... ", high), found->second));
    }
  }
  template <typename Enum, size_t kSize>
  void Choice(const char* name, const std::array<Enum, kSize>& values, absl::string_view (*name_of)(Enum), Enum& out) {
    const auto found = flags_.find(name);
    if (found == flags_.end()) return;
    for (const Enum value : values) {
      if (name_of(value) != found->second) continue;
      out = value;
      return;
    }
    const std::string names =
        absl::StrJoin(values, ", ", [&](std::string* text, Enum value) { absl::StrAppend(text, name_of(value)); });
    error_.Update(Wrong(name, names, found->second));
  }
  void Type(const char* name, DType& out) {
    Choice(name, std::array<DType, 3>{DType::kF32, DType::kF16, DType::kBF16}, DTypeName, out);
  }
  void Text(const char* name, std::string& out) {
    if (const auto found = flags_.find(name); found != flags_.end()) out = found->second;
  }
  const absl::Status& error() const { return error_; }

 private:
  const PlanFlags& flags_;
  absl::Status error_;
};

// Converts numbers and booleans to what the method's parser expects. Other text is returned unchanged, and the parser
// reports what is wrong with it.
OptionValue ValueOf(OptionType type, const std::string& text) {
  double number = 0;
  bool flag = false;
  if ((type == OptionType::kNumber || type == OptionType::kInteger) && absl::SimpleAtod(text, &number)) return number;
  if (type == OptionType::kFlag && absl::SimpleAtob(text, &flag)) return flag;
  return text;
}

absl::Status ReadMethod(const PlanFlags& flags, MethodConfig& method) {
  const absl::StatusOr<std::vector<OptionInfo>> known = MethodOptions(method.name);
  if (!known.ok()) return Wrong("method", absl::StrJoin(MethodNames(), ", "), method.name);
  for (const auto& [flag, text] : flags) {
    std::string name = flag;
    if (absl::StartsWith(flag, kOption))
      name = flag.substr(kOption.size());
    else if (flag != "rank" && flag != "representation")
      continue;
    const auto info =
        std::find_if(known->begin(), known->end(), [&](const OptionInfo& option) { return option.name == name; });
    if (info == known->end()) {
      const bool own = name == flag;
      return Wrong(own ? absl::string_view(flag) : "option", absl::StrCat("an option of method ", method.name),
                   own ? text : name);
    }
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

}  // namespace

bool IsPlanFlag(absl::string_view name) { return std::find(kFlags.begin(), kFlags.end(), name) != kFlags.end(); }

absl::Status AddPlanFlag(absl::string_view name, absl::string_view value, PlanFlags& flags) {
  if (name != "option") {
    flags[std::string(name)] = std::string(value);
    return absl::OkStatus();
  }
  const size_t equals = value.find('=');
  if (equals == absl::string_view::npos || equals == 0) return Wrong(name, "NAME=VALUE", value);
  flags[absl::StrCat(kOption, value.substr(0, equals))] = std::string(value.substr(equals + 1));
  return absl::OkStatus();
}

absl::StatusOr<PlanOptions> ParsePlanOptions(const PlanFlags& flags) {
  PlanOptions options;
  PlanInput& input = options.input;
  SessionSpec& spec = input.spec;
  spec.name = "plan";
  spec.world_size = 8;
  spec.gradient_dtype = DType::kF32;
  input.network_gbps = 10;
  double memory_gib = 8;
  Reader reader(flags);
  reader.Text("preset", options.preset);
  reader.Text("layers", options.layers_file);
  reader.Text("method", spec.method.name);
  reader.Integer("scale", 1, kMaxDimension, options.expand.scale);
  reader.Integer("workers", 1, kMaxWorldSize, spec.world_size);
  reader.Integer("inv-freq", 1, 1 << 30, spec.inv_freq);
  reader.Integer("sketches", 0, kMaxSketches, spec.sketches);
  reader.Integer("shards", 1, kMaxPlanShards, input.shards);
  reader.Integer("threads", 1, 100000, input.threads);
  reader.Number("network-gbps", 1e-6, 1e6, input.network_gbps);
  reader.Number("device-tflops", 1e-6, 1e6, input.device_tflops);
  reader.Number("shard-memory-gib", 1e-6, 1e6, memory_gib);
  reader.Choice("exchange", kExchanges, ExchangeModeName, spec.exchange);
  reader.Choice("statistics", kStatistics, StatisticsKindName, spec.statistics);
  reader.Type("statistics-dtype", spec.statistics_dtype);
  reader.Type("gradient-dtype", spec.gradient_dtype);
  PRECONDOR_RETURN_IF_ERROR(reader.error());
  input.shard_memory_bytes = static_cast<int64_t>(std::floor(memory_gib * (int64_t{1} << 30)));
  PRECONDOR_RETURN_IF_ERROR(CheckFile(options));
  PRECONDOR_RETURN_IF_ERROR(ReadMethod(flags, spec.method));
  PRECONDOR_RETURN_IF_ERROR(CheckSession(spec));
  return options;
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
  --rank=N  default the method's
      The factors have this rank.
  --representation=AUTO|DENSE|LOW_RANK  default AUTO
      The factors have this form.
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
  precondorctl plan --preset=llama2-7b --rank=128 --representation=LOW_RANK --exchange=REPLAY --device-tflops=30
  precondorctl plan --layers=model.json --shards=4 --json | jq .shards_by_memory
)";
}

}  // namespace precondor
