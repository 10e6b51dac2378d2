// SPDX-License-Identifier: Apache-2.0
// The one check of what workers and communicators send: a header is decoded once, checked once, and becomes a value of
// a type that only SessionAdmission can make. Layers take no other.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/check.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "server/core/contribution.h"

namespace precondor {

struct SessionContext;

// A contribution whose session, epoch, rank, incarnation, layer, mode, step window, samples, tensors and byte count
// have been found right. Its payload may still be on its way. What time can change since then (the session is gone, the
// epoch has ended, the step has left the window) is decided where the contribution is filed: see LayerMachine.
class AdmittedContribution {
 public:
  AdmittedContribution(AdmittedContribution&&) = default;
  AdmittedContribution& operator=(AdmittedContribution&&) = default;

  const ContributionHeader& header() const { return header_; }
  // Of the payload that has to come with it.
  uint64_t payload_bytes() const { return payload_bytes_; }
  // Whether this is the session that it was admitted to. Another one of the same id may be another job's.
  bool IsFor(const std::shared_ptr<const SessionContext>& session) const { return session_.lock() == session; }
  // The payload of one that was admitted with `on_device`.
  void PlaceOnDevice(std::shared_ptr<const DevicePayload> payload) {
    PRECONDOR_CHECK(header_.on_device != nullptr && static_cast<uint64_t>(payload->bytes()) == payload_bytes_);
    header_.on_device = std::move(payload);
  }

 private:
  friend class SessionAdmission;
  AdmittedContribution(ContributionHeader header, uint64_t payload_bytes, std::weak_ptr<const SessionContext> session)
      : header_(std::move(header)), payload_bytes_(payload_bytes), session_(std::move(session)) {}

  ContributionHeader header_;
  uint64_t payload_bytes_;
  std::weak_ptr<const SessionContext> session_;  // holds nothing of the session while the payload is on its way
};

// The average of all ranks' gradients, checked likewise.
class AdmittedAverage {
 public:
  AdmittedAverage(AdmittedAverage&&) = default;

  const ReducedGradient& gradient() const { return gradient_; }
  Payload TakeAverage() { return std::exchange(gradient_.average, {}); }

 private:
  friend class SessionAdmission;
  explicit AdmittedAverage(ReducedGradient gradient) : gradient_(std::move(gradient)) {}

  ReducedGradient gradient_;
};

// Who may send to a session: the members of its epoch, as a shard knows them.
struct RankHolders {
  uint64_t epoch = 0;
  uint32_t joined = 0;
  bool fenced = false;                 // the next epoch has begun elsewhere; `epoch` is its number already
  std::vector<uint64_t> incarnations;  // by rank; 0: not joined; while fenced: the last epoch's
};

// Pure functions; every status has an ErrorReason and names session, step, layer and rank.

// Step, epoch, rank and incarnation. InvalidArgument MALFORMED; FailedPrecondition STALE_EPOCH or STALE_INCARNATION;
// NotFound UNKNOWN_RANK; Unavailable FUTURE_EPOCH, or NOT_ACTIVE while ranks are missing or the epoch is about to
// begin.
absl::Status CheckSender(const SessionSpec& spec, const RankHolders& holders, const ContributionKey& key);

// Whether the layer takes a contribution of this kind, at this step, from this rank. InvalidArgument MALFORMED;
// FailedPrecondition NOT_STATISTIC_STEP or NOT_DELEGATE. The layer exists; `method` is the layer's.
absl::Status CheckRole(const SessionSpec& spec, const Method& method, const ContributionHeader& header);

// Samples, number and types of the tensors, their shapes and scales, and the byte count against the layer table.
// InvalidArgument: MALFORMED, DTYPE_MISMATCH, SHAPE_MISMATCH or SIZE_MISMATCH with expected and got. The layer exists.
absl::Status CheckTensors(const SessionSpec& spec, const ContributionHeader& header, uint64_t payload_bytes);

// Shares, samples and the byte count of an average. InvalidArgument MALFORMED. The layer exists.
absl::Status CheckAverage(const SessionSpec& spec, const ReducedGradient& gradient);

}  // namespace precondor
