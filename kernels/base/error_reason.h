// SPDX-License-Identifier: Apache-2.0
// Machine-readable reasons that an absl::Status carries, beside code and message, from core to the client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Values are those of precondor.v1.ErrorReason; proto/wire checks that with static_assert.
enum class ErrorReason : uint8_t {
  kUnspecified = 0,
  kMalformed = 1,  // header or payload could not be decoded
  kUnknownSession = 2,
  kUnknownLayer = 3,
  kUnknownRank = 4,
  kShapeMismatch = 5,
  kDTypeMismatch = 6,
  kSizeMismatch = 7,       // byte count, chunk offset or claimed total
  kStaleEpoch = 8,         // join again
  kFutureEpoch = 9,        // the shard does not know this epoch yet: retry
  kStaleIncarnation = 10,  // a newer process holds this rank
  kStaleStep = 11,         // the step has been retired
  kStepTooFarAhead = 12,
  kConflict = 13,  // same key, other bytes
  kNonFinite = 14,
  kOverNorm = 15,
  kModeConflict = 16,
  kSpecMismatch = 17,
  kNotStatisticStep = 18,
  kNotDelegate = 19,
  kNotOwner = 20,  // another shard owns the layer
  kCapacity = 21,
  kDraining = 22,
  kNotActive = 23,       // not all ranks have joined
  kDuplicateFrame = 24,  // two frames of one contribution overlap on a stream
  kStateLost = 25,       // the shard lost factor updates that a replica's answers depend on
  kStaleLeader = 26,     // another coordinator has replaced the sender
};
inline constexpr size_t kErrorReasonCount = 27;  // checked against the names

absl::string_view ErrorReasonName(ErrorReason reason);  // for example "STALE_EPOCH"

// Returns a status with `reason` attached. The reason survives copies and added context.
absl::Status ReasonedStatus(absl::StatusCode code, ErrorReason reason, absl::string_view message);
// Returns InvalidArgument with kMalformed.
absl::Status MalformedError(absl::string_view message);
ErrorReason GetErrorReason(const absl::Status& status);  // kUnspecified if the status has no reason

}  // namespace precondor
