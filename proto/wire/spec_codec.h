// SPDX-License-Identifier: Apache-2.0
// Converts SessionSpec, its parts and the enumerations to and from precondor.v1. Decoding fills in the defaults that
// the comments of the .proto files give. Its errors are InvalidArgument (MALFORMED) and contain the field's name.
// Ranges are checked elsewhere: by ValidateSessionSpec and, for a method's options, by the registry. Pure functions;
// thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "precondor/v1/common.pb.h"

namespace precondor::wire {

v1::DataType EncodeDType(DType dtype);
v1::Mode EncodeMode(Mode mode);
v1::Decision EncodeDecision(Decision decision);

// `field` is the name for the error message. Unset and unknown values are errors.
absl::StatusOr<DType> DecodeDType(v1::DataType value, absl::string_view field);
absl::StatusOr<Mode> DecodeMode(v1::Mode value, absl::string_view field);
absl::StatusOr<Decision> DecodeDecision(v1::Decision value, absl::string_view field);

// The names of the oneof's arms are the methods' names, and the names of the fields in their messages are the options'
// names. So a new method needs only a message and an arm in common.proto. Encoding returns InvalidArgument for a method
// without an arm, an option without a field, or a value of another type than the field's. Only fields that are present
// become options.
absl::StatusOr<v1::MethodConfig> EncodeMethodConfig(const MethodConfig& config);
absl::StatusOr<MethodConfig> DecodeMethodConfig(const v1::MethodConfig& config);

// Fields go by the names that struct and message have in common. Encoding omits a fallback that has only defaults.
// Decoding refuses unknown fields of a fallback: if they were ignored, the job would switch at another step.
absl::StatusOr<v1::SessionSpec> EncodeSessionSpec(const SessionSpec& spec);
absl::StatusOr<SessionSpec> DecodeSessionSpec(const v1::SessionSpec& spec);

}  // namespace precondor::wire
