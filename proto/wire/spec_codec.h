// SPDX-License-Identifier: Apache-2.0
// SessionSpec, its parts and the enumerations, to and from precondor.v1. Decoding fills in the defaults that the
// .proto comments give; its errors are InvalidArgument (MALFORMED) and name the field. Ranges are checked by
// ValidateSessionSpec and, for a method's options, by the registry: not here. Pure functions; thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "precondor/v1/common.pb.h"

namespace precondor::wire {

v1::DataType EncodeDType(DType dtype);
v1::Mode EncodeMode(Mode mode);
v1::ExchangeMode EncodeExchangeMode(ExchangeMode exchange);
v1::StatisticsKind EncodeStatisticsKind(StatisticsKind kind);
v1::ShardLossPolicy EncodeShardLossPolicy(ShardLossPolicy policy);
v1::DataPlane EncodeDataPlane(DataPlane plane);
v1::Decision EncodeDecision(Decision decision);
v1::FallbackPolicy EncodeFallbackPolicy(FallbackPolicy policy);

// `field` is named in the error. Unset and unknown values are errors.
absl::StatusOr<DType> DecodeDType(v1::DataType value, absl::string_view field);
absl::StatusOr<Mode> DecodeMode(v1::Mode value, absl::string_view field);
absl::StatusOr<ExchangeMode> DecodeExchangeMode(v1::ExchangeMode value, absl::string_view field);
absl::StatusOr<StatisticsKind> DecodeStatisticsKind(v1::StatisticsKind value, absl::string_view field);
absl::StatusOr<ShardLossPolicy> DecodeShardLossPolicy(v1::ShardLossPolicy value, absl::string_view field);
absl::StatusOr<DataPlane> DecodeDataPlane(v1::DataPlane value, absl::string_view field);
absl::StatusOr<Decision> DecodeDecision(v1::Decision value, absl::string_view field);
absl::StatusOr<FallbackPolicy> DecodeFallbackPolicy(v1::FallbackPolicy value, absl::string_view field);

v1::Layer EncodeLayer(const LayerSpec& layer);
LayerSpec DecodeLayer(const v1::Layer& layer);

// The arms of the oneof are the methods' names and the fields of their messages the options' names, so that a new
// method needs its message and arm in common.proto alone. Encoding: InvalidArgument names a method that has no arm, an
// option that has no field, or a value of another type than the field's. Only fields that are present become options.
absl::StatusOr<v1::MethodConfig> EncodeMethodConfig(const MethodConfig& config);
absl::StatusOr<MethodConfig> DecodeMethodConfig(const v1::MethodConfig& config);

// Decoding also refuses fields of a later release: passed over, they would make the job switch at another step.
v1::FallbackConfig EncodeFallbackConfig(const FallbackConfig& config);
absl::StatusOr<FallbackConfig> DecodeFallbackConfig(const v1::FallbackConfig& config);

// A fallback with nothing but defaults is left out.
absl::StatusOr<v1::SessionSpec> EncodeSessionSpec(const SessionSpec& spec);
absl::StatusOr<SessionSpec> DecodeSessionSpec(const v1::SessionSpec& spec);

}  // namespace precondor::wire
