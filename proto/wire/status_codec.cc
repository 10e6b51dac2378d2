// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/status_codec.h"

#include <cstdint>
#include <grpcpp/support/status.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace precondor::wire {
namespace {

#define PRECONDOR_SAME_CODE(absl_code, grpc_code)                                                               \
  static_assert(static_cast<int>(absl::StatusCode::absl_code) == static_cast<int>(grpc::StatusCode::grpc_code), \
                "gRPC and Abseil number this code differently")
PRECONDOR_SAME_CODE(kOk, OK);
PRECONDOR_SAME_CODE(kCancelled, CANCELLED);
PRECONDOR_SAME_CODE(kUnknown, UNKNOWN);
PRECONDOR_SAME_CODE(kInvalidArgument, INVALID_ARGUMENT);
PRECONDOR_SAME_CODE(kDeadlineExceeded, DEADLINE_EXCEEDED);
PRECONDOR_SAME_CODE(kNotFound, NOT_FOUND);
PRECONDOR_SAME_CODE(kAlreadyExists, ALREADY_EXISTS);
PRECONDOR_SAME_CODE(kPermissionDenied, PERMISSION_DENIED);
PRECONDOR_SAME_CODE(kResourceExhausted, RESOURCE_EXHAUSTED);
PRECONDOR_SAME_CODE(kFailedPrecondition, FAILED_PRECONDITION);
PRECONDOR_SAME_CODE(kAborted, ABORTED);
PRECONDOR_SAME_CODE(kOutOfRange, OUT_OF_RANGE);
PRECONDOR_SAME_CODE(kUnimplemented, UNIMPLEMENTED);
PRECONDOR_SAME_CODE(kInternal, INTERNAL);
PRECONDOR_SAME_CODE(kUnavailable, UNAVAILABLE);
PRECONDOR_SAME_CODE(kDataLoss, DATA_LOSS);
PRECONDOR_SAME_CODE(kUnauthenticated, UNAUTHENTICATED);
#undef PRECONDOR_SAME_CODE
constexpr int kLastCode = static_cast<int>(absl::StatusCode::kUnauthenticated);

#define PRECONDOR_SAME_REASON(ours, wire)                                                         \
  static_assert(static_cast<int>(ErrorReason::ours) == static_cast<int>(v1::ERROR_REASON_##wire), \
                "common.proto and error_reason.h number this reason differently")
PRECONDOR_SAME_REASON(kUnspecified, UNSPECIFIED);
PRECONDOR_SAME_REASON(kMalformed, MALFORMED);
PRECONDOR_SAME_REASON(kUnknownSession, UNKNOWN_SESSION);
PRECONDOR_SAME_REASON(kUnknownLayer, UNKNOWN_LAYER);
PRECONDOR_SAME_REASON(kUnknownRank, UNKNOWN_RANK);
PRECONDOR_SAME_REASON(kShapeMismatch, SHAPE_MISMATCH);
PRECONDOR_SAME_REASON(kDTypeMismatch, DTYPE_MISMATCH);
PRECONDOR_SAME_REASON(kSizeMismatch, SIZE_MISMATCH);
PRECONDOR_SAME_REASON(kStaleEpoch, STALE_EPOCH);
PRECONDOR_SAME_REASON(kFutureEpoch, FUTURE_EPOCH);
PRECONDOR_SAME_REASON(kStaleIncarnation, STALE_INCARNATION);
PRECONDOR_SAME_REASON(kStaleStep, STALE_STEP);
PRECONDOR_SAME_REASON(kStepTooFarAhead, STEP_TOO_FAR_AHEAD);
PRECONDOR_SAME_REASON(kConflict, CONFLICT);
PRECONDOR_SAME_REASON(kNonFinite, NON_FINITE);
PRECONDOR_SAME_REASON(kOverNorm, OVER_NORM);
PRECONDOR_SAME_REASON(kModeConflict, MODE_CONFLICT);
PRECONDOR_SAME_REASON(kSpecMismatch, SPEC_MISMATCH);
PRECONDOR_SAME_REASON(kNotStatisticStep, NOT_STATISTIC_STEP);
PRECONDOR_SAME_REASON(kNotDelegate, NOT_DELEGATE);
PRECONDOR_SAME_REASON(kNotOwner, NOT_OWNER);
PRECONDOR_SAME_REASON(kCapacity, CAPACITY);
PRECONDOR_SAME_REASON(kDraining, DRAINING);
PRECONDOR_SAME_REASON(kNotActive, NOT_ACTIVE);
PRECONDOR_SAME_REASON(kDuplicateFrame, DUPLICATE_FRAME);
PRECONDOR_SAME_REASON(kStateLost, STATE_LOST);
PRECONDOR_SAME_REASON(kStaleLeader, STALE_LEADER);
#undef PRECONDOR_SAME_REASON
static_assert(v1::ErrorReason_MAX == v1::ERROR_REASON_STALE_LEADER, "a reason was added: add its line above");

// Bytes of the well-formed UTF-8 sequence at the start of `text`, 0 when there is none (Unicode 15, table 3-7).
size_t SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto in = [](uint8_t b, uint8_t low, uint8_t high) { return b >= low && b <= high; };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = in(lead, 0xC2, 0xDF) ? 2 : in(lead, 0xE0, 0xEF) ? 3 : in(lead, 0xF0, 0xF4) ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  // The second byte's range excludes overlong forms, surrogates and what lies beyond U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (!in(byte(1), low, high)) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!in(byte(i), 0x80, 0xBF)) return 0;
  }
  return length;
}

absl::Status MakeStatus(int code, ErrorReason reason, absl::string_view message) {
  const auto absl_code = static_cast<absl::StatusCode>(code);
  if (reason == ErrorReason::kUnspecified) return absl::Status(absl_code, message);
  return ReasonedStatus(absl_code, reason, message);
}

}  // namespace

std::string SafeText(absl::string_view message) {
  constexpr absl::string_view kEllipsis = "...";
  std::string safe;
  safe.reserve(message.size() < kMaxMessageBytes ? message.size() : kMaxMessageBytes);
  size_t cut = 0;  // where the text ends when the ellipsis has to fit as well
  while (!message.empty()) {
    const size_t length = SequenceLength(message);
    const size_t added = length == 0 ? 1 : length;
    if (safe.size() + added > kMaxMessageBytes) {
      safe.resize(cut);
      absl::StrAppend(&safe, kEllipsis);
      return safe;
    }
    absl::StrAppend(&safe, length == 0 ? absl::string_view("?") : message.substr(0, length));
    if (safe.size() + kEllipsis.size() <= kMaxMessageBytes) cut = safe.size();
    message.remove_prefix(added);
  }
  return safe;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::ErrorDetail detail = ToErrorDetail(status);
  return grpc::Status(static_cast<grpc::StatusCode>(detail.code()), detail.message(), detail.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  int code = static_cast<int>(status.error_code());
  if (code < 0 || code > kLastCode) code = static_cast<int>(absl::StatusCode::kUnknown);
  v1::ErrorDetail detail;
  const bool ours = detail.ParseFromString(status.error_details()) && detail.code() == code;
  // How gRPC 1.51 shows a call that a server has ended because messages had no memory (transport_memory).
  const bool transport_full = absl::StrContains(status.error_message(), "RST_STREAM with error code 11") ||
                              absl::StrContains(status.error_message(), "Buffers full");
  if (!ours && status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && transport_full) {
    code = static_cast<int>(absl::StatusCode::kUnavailable);
  }
  return MakeStatus(code, ours ? FromProtoReason(detail.reason()) : ErrorReason::kUnspecified, status.error_message());
}

v1::ErrorDetail ToErrorDetail(const absl::Status& status) {
  v1::ErrorDetail detail;
  detail.set_code(static_cast<int>(status.code()));  // code(), unlike raw_code(), is always one of the seventeen
  detail.set_reason(ToProtoReason(GetErrorReason(status)));
  detail.set_message(SafeText(status.message()));
  return detail;
}

absl::Status FromErrorDetail(const v1::ErrorDetail& detail) {
  const bool valid = detail.code() > 0 && detail.code() <= kLastCode;
  return MakeStatus(valid ? detail.code() : static_cast<int>(absl::StatusCode::kUnknown),
                    FromProtoReason(detail.reason()), detail.message());
}

v1::ErrorReason ToProtoReason(ErrorReason reason) { return static_cast<v1::ErrorReason>(reason); }

ErrorReason FromProtoReason(v1::ErrorReason reason) {
  return v1::ErrorReason_IsValid(reason) ? static_cast<ErrorReason>(reason) : ErrorReason::kUnspecified;
}

}  // namespace precondor::wire
