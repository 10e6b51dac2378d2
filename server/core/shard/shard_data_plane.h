// SPDX-License-Identifier: Apache-2.0
// What workers and communicators ask of a shard: contributions are admitted, then submitted to their layers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/admission.h"
#include "server/core/contribution.h"
#include "server/core/shard/serving_state.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe. Callbacks run on the caller's thread or an executor thread, never under a lock. Every call but those
// that say otherwise is Unavailable while the shard comes back from its journal.
class ShardDataPlane {
 public:
  // All references outlive it.
  ShardDataPlane(ShardContext& shard, const ShardSessions& sessions, const ServingState& serving)
      : shard_(shard), sessions_(sessions), serving_(serving) {}

  absl::Status CheckServing() const { return serving_.Check(); }

  // Checks a contribution once, by its header, before memory is taken for its payload: session, epoch, rank,
  // incarnation, layer, mode, step window, samples, tensors and byte count. The result is what Submit takes. An error
  // carries an ErrorReason (kernels/base/error_reason.h); nothing has changed then, except that the refusal is counted.
  // `caller`, here and below: PermissionDenied when it does not show the session's secret.
  absl::StatusOr<AdmittedContribution> AdmitContribution(ContributionHeader header, uint64_t payload_bytes,
                                                         const SessionCaller& caller = {});
  // Counts one that was admitted and is not submitted, because its payload could not be had: `why`.
  void CountRefusal(const AdmittedContribution& contribution, const absl::Status& why);

  // How often a session that had been removed has been installed again since the process began, each time without its
  // factors. A client that knows one number has to hear of each later one of its session.
  uint64_t state_generation() const { return sessions_.state_generation(); }
  // Unavailable NOT_ACTIVE: of this session the shard has forgotten what it knew when `generation` was its number.
  absl::Status CheckGeneration(uint64_t session_id, uint64_t generation) const;

  // Takes in an admitted contribution, with a payload of payload_bytes(), none if it lies on the device. `ack` tells:
  // taken in, a repetition, or refused. When it is refused nothing has changed, except that a non-finite or over-norm
  // contribution counts as its rank's abstention, so that the step can seal. It is also refused for what may have
  // changed since the admission: the session is gone (NotFound), in quarantine, installed again or without a lease
  // (Unavailable), its layer has moved (FailedPrecondition), its epoch or step is over.
  // `result`, not for statistics: it follows an OK `ack`, once the plan is sealed and applied; a repetition gets the
  // same bytes. When the session ends or a new epoch drops the slot, `result` gets the status instead.
  void Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result);

  // Takes in what a communicator has made of a step's gradients of one layer. OK: `result` gets the answer, like
  // Submit's. A rank that then sends its gradient over gRPC repeats it, and gets this answer. Otherwise nothing has
  // changed, and the step waits for gradients over gRPC: the errors of AdmitContribution; Aborted when some of these
  // have come already; InvalidArgument where the session's data plane is gRPC.
  absl::Status SubmitReduced(ReducedGradient gradient, ResultFn result);

  // What one of a session's ranks has to know to take part in that. Errors: those of CheckSender.
  struct SessionPart {
    SessionSpec spec;
    std::vector<uint32_t> layers;  // that this shard has, ascending
  };
  absl::StatusOr<SessionPart> PartOf(const ContributionKey& key, const SessionCaller& caller = {}) const;
  // Whether the session is here, and in this epoch.
  bool IsInEpoch(uint64_t session_id, uint64_t epoch) const;

  // A rank that was answered by a memory which may be lost (the one before this process, or another shard's) says what
  // it has: factors of `factor_version` in its last answer of `key.layer`, and the first step whose gradient it will
  // send or send again. What this memory cannot bring to an end any more holds nothing up from then on. DATA_LOSS
  // STATE_LOST: see ErrorReason; otherwise the errors of AdmitContribution that concern the key. Repetitions do no
  // harm. `begins`: a process that has taken the rank over says that it sends nothing of steps before `key.step`.
  absl::Status Resume(const ContributionKey& key, uint64_t factor_version, bool begins = false,
                      const SessionCaller& caller = {});

  // Gives `result` the layer's factors as they are, for a worker that keeps some and has just begun, or lost the
  // thread. Errors: those of AdmitContribution that concern the key, InvalidArgument where the session's workers keep
  // none, ABORTED like Submit's.
  void Fetch(const ContributionKey& key, ResultFn result, const SessionCaller& caller = {});

 private:
  // Tells `ack`, observer and counters that a contribution is refused.
  void Reject(const ContributionHeader& header, const absl::Status& why, const AckFn& ack);
  // The session and the layer that an admitted contribution goes to, as they are now. Errors: see Submit.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindFor(const AdmittedContribution& contribution) const;
  // PermissionDenied; those of ShardSessions::Find.
  absl::StatusOr<std::shared_ptr<ShardSession>> FindFor(const SessionCaller& caller, uint64_t session_id) const;

  ShardContext& shard_;
  const ShardSessions& sessions_;
  const ServingState& serving_;
};

}  // namespace precondor
