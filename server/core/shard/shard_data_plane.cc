// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_data_plane.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/payload.h"
#include "server/core/resources/session_context.h"
#include "server/core/shard/session_admission.h"
#include "server/core/shard/shard_session.h"

namespace precondor {
absl::Status ShardDataPlane::CheckGeneration(uint64_t session_id, uint64_t generation) const {
  if (state_generation() == generation) return absl::OkStatus();
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.Find(session_id);
  if (!session.ok() || (*session)->context().state_generation <= generation) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                        absl::StrCat("session_id ", session_id,
                                     ": removed and installed again since the stream began, expected a new stream"));
}

// --- contributions ---------------------------------------------------------------------------------------------------

absl::StatusOr<AdmittedContribution> ShardDataPlane::AdmitContribution(ContributionHeader header,
                                                                       uint64_t payload_bytes,
                                                                       const SessionCaller& caller) {
  const auto admit = [&]() -> absl::StatusOr<AdmittedContribution> {
    PRECONDOR_RETURN_IF_ERROR(serving_.Check());
    PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, header.key.session_id));
    return SessionAdmission(*session).Admit(header, payload_bytes);
  };
  absl::StatusOr<AdmittedContribution> admitted = admit();
  if (!admitted.ok()) Reject(header, admitted.status(), [](const absl::StatusOr<bool>&) {});
  return admitted;
}

void ShardDataPlane::CountRefusal(const AdmittedContribution& contribution, const absl::Status& why) {
  Reject(contribution.header(), why, [](const absl::StatusOr<bool>&) {});
}

void ShardDataPlane::Reject(const ContributionHeader& header, const absl::Status& why, const AckFn& ack) {
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.Find(header.key.session_id);
  LayerDriver* const layer = session.ok() ? (*session)->layer(header.key.layer) : nullptr;
  if (layer != nullptr) return layer->Acknowledge(header.kind, 0, why, ack);
  shard_.layer_observer.OnRejected(session.ok() ? (*session)->spec().name : "", header.kind, GetErrorReason(why));
  ack(why);
}

absl::StatusOr<std::shared_ptr<ShardSession>> ShardDataPlane::FindFor(const AdmittedContribution& contribution) const {
  const ContributionKey& key = contribution.header().key;
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<ShardSession> session, sessions_.Find(key.session_id));
  if (!contribution.IsFor(session->shared_context())) {
    return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                          absl::StrCat(DescribeKey(session->spec(), key), ": the session has been installed again"));
  }
  return session;
}

void ShardDataPlane::Submit(AdmittedContribution contribution, Payload payload, const AckFn& ack, ResultFn result) {
  const ContributionHeader& header = contribution.header();
  PRECONDOR_CHECK(payload.size() == (header.on_device == nullptr ? contribution.payload_bytes() : 0));
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindFor(contribution);
  if (!session.ok()) return Reject(header, session.status(), ack);
  LayerDriver& layer = *(*session)->layer(header.key.layer);
  if (header.kind == ContributionKind::kStatistics) {
    return layer.SubmitStatistics(std::move(contribution), std::move(payload), ack);
  }
  layer.SubmitGradient(std::move(contribution), std::move(payload), ack, std::move(result));
}

// --- ranks -----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<ShardSession>> ShardDataPlane::FindFor(const SessionCaller& caller,
                                                                      uint64_t session_id) const {
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<ShardSession> session, sessions_.Find(session_id));
  if (!session->context().access.IsShownBy(caller)) return NotTheirs(session_id);
  return session;
}

absl::StatusOr<std::set<uint32_t>> ShardDataPlane::MissingRanks(const ContributionKey& key,
                                                                const SessionCaller& caller) const {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, key.session_id));
  PRECONDOR_RETURN_IF_ERROR(SessionAdmission(*session).CheckKey(key));
  return session->layer(key.layer)->MissingRanks(key.step);
}

absl::StatusOr<uint64_t> ShardDataPlane::Resume(const RankResume& resume, const SessionCaller& caller) {
  const ContributionKey& key = resume.key;
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, key.session_id));
  PRECONDOR_RETURN_IF_ERROR(SessionAdmission(*session).CheckKey(key));
  return session->layer(key.layer)->Resume(resume);
}

void ShardDataPlane::Fetch(const ContributionKey& key, ResultFn result, const SessionCaller& caller) {
  absl::Status status = serving_.Check();
  if (!status.ok()) return result(std::move(status));
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindFor(caller, key.session_id);
  status = session.status();
  if (status.ok()) status = SessionAdmission(**session).CheckKey(key);
  if (!status.ok()) return result(std::move(status));
  if (WorkersPrecondition((*session)->spec())) return (*session)->layer(key.layer)->Fetch(key, std::move(result));
  const std::shared_ptr<SessionContext> context = (*session)->shared_context();
  if (context->fetching.exchange(true)) {
    return result(ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                                 absl::StrCat(DescribeKey((*session)->spec(), key),
                                              ": FETCH: expected one at a time in "
                                              "a session whose workers keep no factors")));
  }
  // One answer of a session is in memory at a time, until the last byte has been written.
  (*session)->layer(key.layer)->Fetch(
      key, [context, result = std::move(result)](absl::StatusOr<GradientResult> answer) {
        const auto done = [context](const auto*) { context->fetching = false; };
        if (!answer.ok() || answer->bytes == nullptr) {
          done(context.get());
        } else {
          answer->bytes =
              std::shared_ptr<const Payload>(answer->bytes.get(), [bytes = answer->bytes, done](auto* p) mutable {
                bytes = nullptr;
                done(p);
              });
        }
        result(std::move(answer));
      });
}

}  // namespace precondor
