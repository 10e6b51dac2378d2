// SPDX-License-Identifier: Apache-2.0
// The shard's interface to workers: contributions are admitted, then submitted to their layers.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"
#include "server/core/layer/admission.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe. Callbacks run on the caller's thread or on an executor thread, never under a lock. AdmitContribution,
// MissingRanks, Resume and Fetch give UNAVAILABLE while the shard replays its journal.
class ShardDataPlane {
 public:
  // All references must outlive the object.
  ShardDataPlane(ShardContext& shard, const ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  absl::Status CheckServing() const { return serving_.Check(); }

  // Checks a contribution once, by its header, before memory is allocated for its payload: session, epoch, rank,
  // incarnation, layer, mode, step window, samples, tensors and byte count. Submit takes the result. An error carries
  // an ErrorReason (kernels/base/error_reason.h) and changes nothing, except that the refusal is counted. This and the
  // other calls with a `caller` give PERMISSION_DENIED if the caller does not show the session's secret.
  absl::StatusOr<AdmittedContribution> AdmitContribution(ContributionHeader header, uint64_t payload_bytes,
                                                         const SessionCaller& caller = {});
  // Counts the refusal of a contribution, also of an admitted one whose payload could not be received.
  void CountRefusal(const ContributionHeader& header, const absl::Status& why);

  // Returns how often a removed session has been installed again since the process began, each time without its
  // factors. A client that knows an earlier value must learn of each later one that concerns its session: see
  // CheckGeneration.
  uint64_t state_generation() const { return sessions_.state_generation(); }
  // Returns UNAVAILABLE (NOT_ACTIVE) if the session was removed and installed again after state_generation() was
  // `generation`.
  absl::Status CheckGeneration(uint64_t session_id, uint64_t generation) const;

  // Submits an admitted contribution with its payload of payload_bytes() bytes; the payload is empty if the
  // contribution is in device memory. `ack` gets false if the contribution was taken in, true if it is a repetition, or
  // an error if it is refused. A refusal changes nothing, except that a non-finite or over-norm contribution counts as
  // its rank's abstention, so that the step can seal. A contribution is also refused for changes since its admission:
  // NOT_FOUND if the session has been removed, UNAVAILABLE if it is in quarantine or was installed again, and the
  // layer's errors if the epoch or the step has ended.
  // For gradients and pulls, `result` follows an OK `ack` once the step is sealed and applied; a repetition gets
  // identical bytes. If the session ends or a new epoch drops the step, `result` gets the status instead.
  void Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);

  // Returns the ranks that the step of the key's layer waits for, or the errors of AdmitContribution that concern the
  // key.
  absl::StatusOr<std::set<uint32_t>> MissingRanks(const ContributionKey& key, const SessionCaller& caller = {}) const;

  // Handles a RESUME: a rank whose answers are from another shard generation (an earlier process of this shard, or
  // another shard) tells what it has. Steps that can no longer complete stop blocking later ones. Idempotent. Returns
  // the number of updates that are lost to the rank; DATA_LOSS (STATE_LOST) as described at LayerDriver::Resume; or the
  // errors of AdmitContribution that concern the key.
  absl::StatusOr<uint64_t> Resume(const RankResume& resume, const SessionCaller& caller = {});

  // Gives `result` the layer's current factors, for a checkpoint, or for a worker that keeps factors and has none, or
  // not the right version. `result` gets the errors of AdmitContribution that concern the key, or ABORTED as in Submit.
  void Fetch(const ContributionKey& key, ResultFn result, const SessionCaller& caller = {});

 private:
  // Returns the current session for an admitted contribution, since its payload may have taken long. Errors: see
  // Submit.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindFor(const AdmittedContribution& contribution) const;
  // Returns the session that the key names, with the layer on this shard. The one check of who asks, in this order:
  // UNAVAILABLE during the replay, the errors of ShardSessions::Find, PERMISSION_DENIED, the errors of CheckSender,
  // NOT_FOUND (UNKNOWN_LAYER), FAILED_PRECONDITION (NOT_OWNER) if another shard owns the layer.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindFor(const SessionCaller& caller, const ContributionKey& key) const;

  ShardContext& shard_;
  const ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor
