// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/spec_codec.h"

#include <algorithm>
#include <cmath>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/schedule.h"
#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;
using google::protobuf::Reflection;

#define PRECONDOR_SAME_VALUE(ours, wire)                              \
  static_assert(static_cast<int>(ours) == static_cast<int>(v1::wire), \
                "common.proto and kernels/base number it differently")
PRECONDOR_SAME_VALUE(DType::kF32, DATA_TYPE_F32);
PRECONDOR_SAME_VALUE(DType::kF16, DATA_TYPE_F16);
PRECONDOR_SAME_VALUE(DType::kBF16, DATA_TYPE_BF16);
PRECONDOR_SAME_VALUE(Mode::kSecondOrder, MODE_SECOND_ORDER);
PRECONDOR_SAME_VALUE(Mode::kFirstOrder, MODE_FIRST_ORDER);
PRECONDOR_SAME_VALUE(ExchangeMode::kDirect, EXCHANGE_MODE_DIRECT);
PRECONDOR_SAME_VALUE(ExchangeMode::kDelegate, EXCHANGE_MODE_DELEGATE);
PRECONDOR_SAME_VALUE(ExchangeMode::kPullFactors, EXCHANGE_MODE_PULL_FACTORS);
PRECONDOR_SAME_VALUE(ExchangeMode::kReplay, EXCHANGE_MODE_REPLAY);
PRECONDOR_SAME_VALUE(ExchangeMode::kSharded, EXCHANGE_MODE_SHARDED);
PRECONDOR_SAME_VALUE(StatisticsKind::kMean, STATISTICS_KIND_MEAN);
PRECONDOR_SAME_VALUE(StatisticsKind::kPerWorkerMean, STATISTICS_KIND_PER_WORKER_MEAN);
PRECONDOR_SAME_VALUE(StatisticsKind::kSigned, STATISTICS_KIND_SIGNED);
PRECONDOR_SAME_VALUE(StatisticsKind::kCovariance, STATISTICS_KIND_COVARIANCE);
PRECONDOR_SAME_VALUE(Decision::kPreconditioned, DECISION_PRECONDITIONED);
PRECONDOR_SAME_VALUE(Decision::kIdentity, DECISION_IDENTITY);
PRECONDOR_SAME_VALUE(Decision::kSkip, DECISION_SKIP);
PRECONDOR_SAME_VALUE(FallbackPolicy::kNever, FALLBACK_POLICY_NEVER);
PRECONDOR_SAME_VALUE(FallbackPolicy::kLossRate, FALLBACK_POLICY_LOSS_RATE);
PRECONDOR_SAME_VALUE(FallbackPolicy::kAtStep, FALLBACK_POLICY_AT_STEP);
#undef PRECONDOR_SAME_VALUE
static_assert(v1::DataType_MAX == v1::DATA_TYPE_BF16 && v1::Mode_MAX == v1::MODE_FIRST_ORDER &&
                  v1::ExchangeMode_MAX == v1::EXCHANGE_MODE_SHARDED &&
                  v1::StatisticsKind_MAX == v1::STATISTICS_KIND_COVARIANCE && v1::Decision_MAX == v1::DECISION_SKIP &&
                  v1::FallbackPolicy_MAX == v1::FALLBACK_POLICY_AT_STEP,
              "a value was added: add its line above");

// All these enumerations use 0 for "not set" and number their values from 1, without gaps but in FallbackPolicy.
template <typename Ours, typename Wire>
absl::StatusOr<Ours> DecodeEnum(Wire value, int last, absl::string_view type, absl::string_view field) {
  const int number = static_cast<int>(value);
  if (number >= 1 && number <= last) return static_cast<Ours>(number);
  return MalformedError(absl::StrCat(field, ": expected a ", type, " of 1 ... ", last, ", got ", number,
                                     number == 0 ? " (not set)" : ""));
}

template <typename Ours, typename Wire>
Wire EncodeEnum(Ours value) {
  return static_cast<Wire>(static_cast<int>(value));
}

const OneofDescriptor& MethodOneof() { return *v1::MethodConfig::descriptor()->FindOneofByName("method"); }

std::string MethodNames() {
  std::string names;
  for (int i = 0; i < MethodOneof().field_count(); ++i) {
    absl::StrAppend(&names, i == 0 ? "" : ", ", MethodOneof().field(i)->name());
  }
  return names;
}

std::string OptionNames(const Descriptor& options) {
  if (options.field_count() == 0) return "(no options)";
  std::vector<std::string> names;
  names.reserve(options.field_count());
  for (int i = 0; i < options.field_count(); ++i) names.push_back(options.field(i)->name());
  std::sort(names.begin(), names.end());
  return absl::StrJoin(names, ", ");
}

std::string Text(const OptionValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return absl::StrCat("\"", text->substr(0, 64), "\"");
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return absl::StrCat(std::get<double>(value));
}

absl::Status WrongType(absl::string_view method, absl::string_view option, absl::string_view expected,
                       const OptionValue& got) {
  return MalformedError(absl::StrCat("method.", method, ".", option, ": expected ", expected, ", got ", Text(got)));
}

// Sets one option of a method's message.
absl::Status SetOption(const std::string& method, const std::string& name, const OptionValue& value, Message& message) {
  const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(name);
  if (field == nullptr) {
    return MalformedError(absl::StrCat("method.", method, ": expected one of ", OptionNames(*message.GetDescriptor()),
                                       ", got \"", name.substr(0, 64), "\""));
  }
  const Reflection& reflection = *message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: {
      if (std::holds_alternative<bool>(value)) return WrongType(method, name, "a string", value);
      const auto* number = std::get_if<double>(&value);
      reflection.SetString(&message, field, number != nullptr ? Schedule::Text(*number) : std::get<std::string>(value));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const auto* number = std::get_if<double>(&value);
      if (number == nullptr) return WrongType(method, name, "a number", value);
      reflection.SetDouble(&message, field, *number);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto* number = std::get_if<double>(&value);
      const bool fits = number != nullptr && *number == std::floor(*number) &&
                        std::abs(*number) <= std::numeric_limits<int32_t>::max();
      if (!fits) return WrongType(method, name, "a whole number of 32 bits", value);
      reflection.SetInt32(&message, field, static_cast<int32_t>(*number));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      const auto* flag = std::get_if<bool>(&value);
      if (flag == nullptr) return WrongType(method, name, "true or false", value);
      reflection.SetBool(&message, field, *flag);
      return absl::OkStatus();
    }
    default:
      return absl::InternalError(absl::StrCat(field->full_name(), ": options are string, double, int32 or bool"));
  }
}

absl::StatusOr<OptionValue> GetOption(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return OptionValue(reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return OptionValue(reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return OptionValue(static_cast<double>(reflection.GetInt32(message, &field)));
    case FieldDescriptor::CPPTYPE_BOOL:
      return OptionValue(reflection.GetBool(message, &field));
    default:
      return absl::InternalError(absl::StrCat(field.full_name(), ": options are string, double, int32 or bool"));
  }
}

// The number of FallbackPolicy that was COST_AWARE.
constexpr int kRemovedPolicy = 3;

// Returns the value of an unknown field with a varint, or 0 if there is none.
uint64_t UnknownVarint(const Message& message, int number) {
  const google::protobuf::UnknownFieldSet& unknown = message.GetReflection()->GetUnknownFields(message);
  uint64_t value = 0;
  for (int i = 0; i < unknown.field_count(); ++i) {
    const google::protobuf::UnknownField& field = unknown.field(i);
    if (field.number() == number && field.type() == google::protobuf::UnknownField::TYPE_VARINT) value = field.varint();
  }
  return value;
}

// Returns 0 if there is none.
int FirstUnknownField(const Message& message) {
  const google::protobuf::UnknownFieldSet& unknown = message.GetReflection()->GetUnknownFields(message);
  return unknown.empty() ? 0 : unknown.field(0).number();
}

// Decodes an enumeration field of a SessionSpec into `out`. A value of 0 keeps the default that `out` has.
template <typename Ours, typename Wire>
absl::Status DecodeOrDefault(Wire value, absl::StatusOr<Ours> (*decode)(Wire, absl::string_view),
                             absl::string_view field, Ours& out) {
  if (static_cast<int>(value) == 0) return absl::OkStatus();
  absl::StatusOr<Ours> decoded = decode(value, field);
  if (decoded.ok()) out = *decoded;
  return decoded.status();
}

}  // namespace

v1::DataType EncodeDType(DType dtype) { return EncodeEnum<DType, v1::DataType>(dtype); }
v1::Mode EncodeMode(Mode mode) { return EncodeEnum<Mode, v1::Mode>(mode); }
v1::ExchangeMode EncodeExchangeMode(ExchangeMode exchange) {
  return EncodeEnum<ExchangeMode, v1::ExchangeMode>(exchange);
}
v1::StatisticsKind EncodeStatisticsKind(StatisticsKind kind) {
  return EncodeEnum<StatisticsKind, v1::StatisticsKind>(kind);
}
v1::Decision EncodeDecision(Decision decision) { return EncodeEnum<Decision, v1::Decision>(decision); }
v1::FallbackPolicy EncodeFallbackPolicy(FallbackPolicy policy) {
  return EncodeEnum<FallbackPolicy, v1::FallbackPolicy>(policy);
}

absl::StatusOr<DType> DecodeDType(v1::DataType value, absl::string_view field) {
  return DecodeEnum<DType>(value, v1::DataType_MAX, "DataType", field);
}
absl::StatusOr<Mode> DecodeMode(v1::Mode value, absl::string_view field) {
  return DecodeEnum<Mode>(value, v1::Mode_MAX, "Mode", field);
}
absl::StatusOr<ExchangeMode> DecodeExchangeMode(v1::ExchangeMode value, absl::string_view field) {
  return DecodeEnum<ExchangeMode>(value, v1::ExchangeMode_MAX, "ExchangeMode", field);
}
absl::StatusOr<StatisticsKind> DecodeStatisticsKind(v1::StatisticsKind value, absl::string_view field) {
  return DecodeEnum<StatisticsKind>(value, v1::StatisticsKind_MAX, "StatisticsKind", field);
}
absl::StatusOr<Decision> DecodeDecision(v1::Decision value, absl::string_view field) {
  return DecodeEnum<Decision>(value, v1::Decision_MAX, "Decision", field);
}
absl::StatusOr<FallbackPolicy> DecodeFallbackPolicy(v1::FallbackPolicy value, absl::string_view field) {
  if (static_cast<int>(value) == kRemovedPolicy) return FallbackPolicy::kLossRate;
  return DecodeEnum<FallbackPolicy>(value, v1::FallbackPolicy_MAX, "FallbackPolicy", field);
}

v1::Layer EncodeLayer(const LayerSpec& layer) {
  v1::Layer out;
  out.set_name(layer.name);
  out.set_d_out(layer.d_out);
  out.set_d_in(layer.d_in);
  out.set_has_bias(layer.has_bias);
  out.mutable_shape()->Add(layer.shape.begin(), layer.shape.end());
  return out;
}

LayerSpec DecodeLayer(const v1::Layer& layer) {
  return LayerSpec{.name = layer.name(),
                   .d_out = layer.d_out(),
                   .d_in = layer.d_in(),
                   .has_bias = layer.has_bias(),
                   .shape = {layer.shape().begin(), layer.shape().end()}};
}

absl::StatusOr<v1::MethodConfig> EncodeMethodConfig(const MethodConfig& config) {
  const FieldDescriptor* arm = v1::MethodConfig::descriptor()->FindFieldByName(config.name);
  if (arm == nullptr || arm->containing_oneof() != &MethodOneof()) {
    return MalformedError(absl::StrCat("method: expected one of ", MethodNames(), ", got \"", config.name, "\""));
  }
  v1::MethodConfig out;
  Message& message = *out.GetReflection()->MutableMessage(&out, arm);
  for (const auto& [name, value] : config.options) {
    PRECONDOR_RETURN_IF_ERROR(SetOption(config.name, name, value, message));
  }
  return out;
}

absl::StatusOr<MethodConfig> DecodeMethodConfig(const v1::MethodConfig& config) {
  MethodConfig out;
  const FieldDescriptor* arm = config.GetReflection()->GetOneofFieldDescriptor(config, &MethodOneof());
  // An unknown field of a newer peer would change the arithmetic if it were ignored.
  if (const int number = FirstUnknownField(config); number != 0) {
    return MalformedError(absl::StrCat("method: expected one of ", MethodNames(), ", got unknown field ", number));
  }
  if (arm == nullptr) return out;  // mkor with defaults
  out.name = arm->name();
  const Message& message = config.GetReflection()->GetMessage(config, arm);
  if (const int number = FirstUnknownField(message); number != 0) {
    return MalformedError(absl::StrCat("method.", out.name, ": expected one of ", OptionNames(*message.GetDescriptor()),
                                       ", got unknown field ", number));
  }
  const Descriptor& options = *message.GetDescriptor();
  for (int i = 0; i < options.field_count(); ++i) {
    const FieldDescriptor& field = *options.field(i);
    if (!message.GetReflection()->HasField(message, &field)) continue;
    PRECONDOR_ASSIGN_OR_RETURN(OptionValue value, GetOption(message, field));
    out.options.emplace(field.name(), std::move(value));
  }
  return out;
}

v1::FallbackConfig EncodeFallbackConfig(const FallbackConfig& config) {
  v1::FallbackConfig out;
  out.set_policy(EncodeFallbackPolicy(config.policy));
  if (config.at_step) out.set_at_step(*config.at_step);
  out.set_rate_decay(config.rate_decay);
  out.set_lr_jump(config.lr_jump);
  out.set_min_steps(config.min_steps);
  out.set_beta(config.beta);
  out.set_patience_steps(config.patience_steps);
  return out;
}

absl::StatusOr<FallbackConfig> DecodeFallbackConfig(const v1::FallbackConfig& config) {
  const google::protobuf::UnknownFieldSet& unknown = config.GetReflection()->GetUnknownFields(config);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (!v1::FallbackConfig::descriptor()->IsReservedNumber(number)) {
      return MalformedError(absl::StrCat("fallback: unknown option, field ", number));
    }
  }
  FallbackConfig out;
  PRECONDOR_RETURN_IF_ERROR(DecodeOrDefault(config.policy(), &DecodeFallbackPolicy, "fallback.policy", out.policy));
  if (config.has_at_step()) out.at_step = config.at_step();
  if (config.has_rate_decay()) out.rate_decay = config.rate_decay();
  if (config.has_lr_jump()) out.lr_jump = config.lr_jump();
  if (config.has_min_steps()) out.min_steps = config.min_steps();
  if (config.has_beta()) out.beta = config.beta();
  if (config.has_patience_steps()) out.patience_steps = config.patience_steps();
  return out;
}

namespace {

absl::StatusOr<LayerMethod> DecodeLayerMethod(const v1::LayerMethod& entry) {
  LayerMethod out;
  PRECONDOR_ASSIGN_OR_RETURN(out.method, DecodeMethodConfig(entry.method()));
  PRECONDOR_RETURN_IF_ERROR(
      DecodeOrDefault(entry.statistics(), &DecodeStatisticsKind, "layer_methods.statistics", out.statistics));
  out.layers.assign(entry.layers().begin(), entry.layers().end());
  return out;
}

}  // namespace

absl::StatusOr<v1::SessionSpec> EncodeSessionSpec(const SessionSpec& spec) {
  PRECONDOR_ASSIGN_OR_RETURN(v1::MethodConfig method, EncodeMethodConfig(spec.method));
  v1::SessionSpec out;
  out.set_name(spec.name);
  out.set_seed(spec.seed);
  out.set_world_size(spec.world_size);
  out.set_exchange(EncodeExchangeMode(spec.exchange));
  out.set_statistics(EncodeStatisticsKind(spec.statistics));
  out.set_sketches(spec.sketches);
  out.set_inv_freq(spec.inv_freq);
  out.set_warmup_steps(spec.warmup_steps);
  out.set_statistics_data_type(EncodeDType(spec.statistics_dtype));
  out.set_gradient_data_type(EncodeDType(spec.gradient_dtype));
  *out.mutable_method() = std::move(method);
  if (!(spec.fallback == FallbackConfig{})) *out.mutable_fallback() = EncodeFallbackConfig(spec.fallback);
  for (const LayerSpec& layer : spec.layers) *out.add_layers() = EncodeLayer(layer);
  for (const LayerMethod& entry : spec.layer_methods) {
    v1::LayerMethod& encoded = *out.add_layer_methods();
    PRECONDOR_ASSIGN_OR_RETURN(*encoded.mutable_method(), EncodeMethodConfig(entry.method));
    encoded.set_statistics(EncodeStatisticsKind(entry.statistics));
    encoded.mutable_layers()->Add(entry.layers.begin(), entry.layers.end());
  }
  out.mutable_delegates()->Add(spec.delegates.begin(), spec.delegates.end());
  return out;
}

absl::Status CheckNoRemovedOption(const v1::SessionSpec& spec) {
  const auto removed = [](absl::string_view what) {
    return MalformedError(absl::StrCat(what, " is no longer supported: leave it out"));
  };
  if (UnknownVarint(spec, 9) != 0) return removed("staleness_steps");
  if (UnknownVarint(spec, 15) == 2) return removed("on_shard_loss DEGRADE");
  if (static_cast<int>(spec.fallback().policy()) == kRemovedPolicy) return removed("fallback.policy COST_AWARE");
  if (UnknownVarint(spec.fallback(), 14) != 0) return removed("fallback.reentry");
  return absl::OkStatus();
}

absl::StatusOr<SessionSpec> DecodeSessionSpec(const v1::SessionSpec& spec) {
  SessionSpec out;  // its initializers are the defaults of common.proto; spec_codec_test compares them
  out.name = spec.name();
  out.seed = spec.seed();
  out.world_size = spec.world_size();
  absl::Status status = DecodeOrDefault(spec.exchange(), &DecodeExchangeMode, "exchange", out.exchange);
  status.Update(DecodeOrDefault(spec.statistics(), &DecodeStatisticsKind, "statistics", out.statistics));
  status.Update(
      DecodeOrDefault(spec.statistics_data_type(), &DecodeDType, "statistics_data_type", out.statistics_dtype));
  status.Update(DecodeOrDefault(spec.gradient_data_type(), &DecodeDType, "gradient_data_type", out.gradient_dtype));
  PRECONDOR_RETURN_IF_ERROR(status);
  PRECONDOR_ASSIGN_OR_RETURN(out.method, DecodeMethodConfig(spec.method()));
  PRECONDOR_ASSIGN_OR_RETURN(out.fallback, DecodeFallbackConfig(spec.fallback()));
  out.sketches = spec.sketches();
  if (spec.has_inv_freq()) out.inv_freq = spec.inv_freq();
  if (spec.has_warmup_steps()) out.warmup_steps = spec.warmup_steps();
  out.layers.reserve(spec.layers_size());
  for (const v1::Layer& layer : spec.layers()) out.layers.push_back(DecodeLayer(layer));
  for (const v1::LayerMethod& entry : spec.layer_methods()) {
    PRECONDOR_ASSIGN_OR_RETURN(out.layer_methods.emplace_back(), DecodeLayerMethod(entry));
  }
  out.delegates.assign(spec.delegates().begin(), spec.delegates().end());
  if (out.sketches == 0 && UsesSketches(out) && out.world_size > 0) out.sketches = SketchesPerWorker(out);
  return out;
}

}  // namespace precondor::wire
