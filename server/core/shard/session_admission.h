// SPDX-License-Identifier: Apache-2.0
// What a session checks of a request before its layers get it. The only maker of what layers take.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/admission.h"
#include "server/core/shard/shard_session.h"

namespace precondor {

// A view of a session, which outlives it. Thread-safe.
class SessionAdmission {
 public:
  explicit SessionAdmission(const ShardSession& session) : session_(session) {}

  // What makes a contribution, or an average of all ranks, fit to be submitted to its layer; see
  // ShardDataPlane::AdmitContribution and SubmitReduced. An error leaves `header` as it is; otherwise it is moved from.
  absl::StatusOr<AdmittedContribution> Admit(ContributionHeader& header, uint64_t payload_bytes) const;
  absl::StatusOr<AdmittedAverage> Admit(ReducedGradient gradient) const;
  // The errors of CheckSender; NotFound UNKNOWN_LAYER; FailedPrecondition NOT_OWNER.
  absl::Status CheckKey(const ContributionKey& key) const;
  // CheckKey; InvalidArgument where the session's workers keep no factors.
  absl::Status CheckFetch(const ContributionKey& key) const;

 private:
  absl::Status CheckLayer(const ContributionKey& key) const;

  const ShardSession& session_;
};

}  // namespace precondor
