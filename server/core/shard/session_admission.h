// SPDX-License-Identifier: Apache-2.0
// Checks requests to a session before its layers receive them. Only this class makes the type that layers accept.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/layer/admission.h"
#include "server/core/shard/shard_session.h"

namespace precondor {

// Thread-safe. A view of a session; the session must outlive it.
class SessionAdmission {
 public:
  explicit SessionAdmission(const ShardSession& session) : session_(session) {}

  // Checks a contribution and returns the value that is submitted to its layer. Conditions and errors are those of
  // ShardDataPlane::AdmitContribution. Moves from `header` on success and leaves it unchanged on error.
  absl::StatusOr<AdmittedContribution> Admit(ContributionHeader& header, uint64_t payload_bytes) const;
  // Returns the errors of CheckSender, NOT_FOUND (UNKNOWN_LAYER) if the session has no such layer, or
  // FAILED_PRECONDITION (NOT_OWNER) if another shard owns it.
  absl::Status CheckKey(const ContributionKey& key) const;

 private:
  const ShardSession& session_;
};

}  // namespace precondor
