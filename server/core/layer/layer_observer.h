// SPDX-License-Identifier: Apache-2.0
// What the layers of a shard tell of their steps.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_spec.h"
#include "server/core/contribution.h"

namespace precondor {

// See Observer for how the calls come.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void OnContribution(absl::string_view train_job, ContributionKind kind, int64_t bytes) {}
  virtual void OnDuplicate(absl::string_view train_job, ContributionKind kind) {}
  virtual void OnRejected(absl::string_view train_job, ContributionKind kind, ErrorReason reason) {}
  // First contribution to seal of one (step, layer).
  virtual void OnSealed(absl::string_view train_job, ContributionKind kind, absl::Duration open_for) {}
  virtual void OnUpdate(absl::string_view train_job, absl::Duration took, bool ok) {}
  // A shard came back without this many updates that workers have had answers of.
  virtual void OnUpdatesLost(absl::string_view train_job, int64_t updates) {}
  virtual void OnPrecondition(absl::string_view train_job, absl::Duration took) {}
  // What all ranks' gradients of a layer and step, or their pulls, will be answered with.
  virtual void OnPlan(Decision decision, AnswerCause cause) {}
  virtual void OnResult(absl::string_view train_job, Decision decision, int64_t bytes) {}
  // A worker was given a layer's factors as they are (FETCH).
  virtual void OnFetch(absl::string_view train_job, int64_t bytes) {}
};

}  // namespace precondor
