// SPDX-License-Identifier: Apache-2.0
// Notifications of the layers of a shard about their steps.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"

namespace precondor {

// Receives the notifications of a shard's layers. Observer has the rules for these calls.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {}
  virtual void OnDuplicate(absl::string_view train_job, ContributionKind kind) {}
  virtual void OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {}
  // `open_for` is the time from the first contribution to the seal of one (step, layer).
  virtual void OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) {}
  virtual void OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {}
  // A shard lacks `updates` updates that are in an answer which a worker has received.
  virtual void OnUpdatesLost(absl::string_view train_job, int64_t updates) {}
  virtual void OnPrecondition(absl::string_view train_job, absl::Duration took) {}
  // The shard has decided the answer to all ranks' gradients, or pulls, of one (step, layer).
  virtual void OnPlan(Decision decision, AnswerCause cause) {}
  virtual void OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {}
  // A worker has received a layer's current factors (FETCH).
  virtual void OnFetch(absl::string_view train_job, int64_t bytes) {}
};

}  // namespace precondor
