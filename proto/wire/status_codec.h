// SPDX-License-Identifier: Apache-2.0
// The one place where statuses cross between absl and gRPC. A status travels as a gRPC code and message, with a
// serialized precondor.v1.ErrorDetail as its details, or as an ErrorDetail inside an ERROR frame; code, ErrorReason
// and message survive either way. Pure functions; thread-safe.
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

// Longest message sent, in bytes; a longer one is cut before the character that does not fit and ends in "...".
inline constexpr size_t kMaxMessageBytes = 1024;

// `message` as valid UTF-8 of at most kMaxMessageBytes: each byte that is not part of a valid sequence becomes '?'.
// Every text put into a protobuf string goes through this, since a peer refuses the whole message otherwise.
std::string SafeText(absl::string_view message);

grpc::Status ToGrpcStatus(const absl::Status& status);
// Details that are not an ErrorDetail of the same code (another server's, a proxy's) are left out.
absl::Status FromGrpcStatus(const grpc::Status& status);

// `status` must not be OK.
v1::ErrorDetail ToErrorDetail(const absl::Status& status);
// Never OK: an ErrorDetail without a valid code is Unknown, with the message it came with.
absl::Status FromErrorDetail(const v1::ErrorDetail& detail);

v1::ErrorReason ToProtoReason(ErrorReason reason);
// A reason that this release does not know is kUnspecified.
ErrorReason FromProtoReason(v1::ErrorReason reason);

}  // namespace precondor::wire
