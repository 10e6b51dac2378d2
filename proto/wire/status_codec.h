// SPDX-License-Identifier: Apache-2.0
// Converts statuses between absl and gRPC; no other code does. A status is transmitted as a gRPC code and message with
// a serialized precondor.v1.ErrorDetail as details, or as an ErrorDetail in an ERROR frame. Both preserve code,
// ErrorReason and message. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "precondor/v1/common.pb.h"

namespace grpc {
class Status;
}

namespace precondor::wire {

// Maximum length of a message in bytes. A longer one is truncated at a character boundary and ends in "...".
inline constexpr size_t kMaxMessageBytes = 1024;

// Returns `message` as valid UTF-8 of at most kMaxMessageBytes, with each byte that is not part of a valid sequence
// replaced by '?'. Apply it to every text that goes into a protobuf string: a receiver rejects a whole message with
// invalid UTF-8.
std::string SafeText(absl::string_view message);

grpc::Status ToGrpcStatus(const absl::Status& status);
// Ignores details that are not an ErrorDetail with the status' code, such as those of another server or a proxy.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Precondition: `status` is not OK.
v1::ErrorDetail ToErrorDetail(const absl::Status& status);
// Never returns OK: an ErrorDetail without a valid code gives Unknown, with its message.
absl::Status FromErrorDetail(const v1::ErrorDetail& detail);

v1::ErrorReason ToProtoReason(ErrorReason reason);
// Returns kUnspecified for a reason that this release does not know.
ErrorReason FromProtoReason(v1::ErrorReason reason);

}  // namespace precondor::wire
