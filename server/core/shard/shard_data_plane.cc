// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard_data_plane.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/admission.h"
#include "server/core/resources/session_context.h"
#include "server/core/shard/shard_session.h"

namespace precondor {
namespace {

absl::Status CheckNotInstalledAfter(uint64_t generation, const SessionContext& session) {
  if (session.state_generation <= generation) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                        absl::StrCat("session_id ", session.session_id,
                                     ": removed and installed again since the stream began, expected a new stream"));
}

}  // namespace

absl::Status ShardDataPlane::CheckGeneration(uint64_t session_id, uint64_t generation) const {
  if (state_generation() == generation) return absl::OkStatus();
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.Find(session_id);
  return session.ok() ? CheckNotInstalledAfter(generation, (*session)->context()) : absl::OkStatus();
}

// --- contributions ---------------------------------------------------------------------------------------------------

absl::StatusOr<AdmittedContribution> ShardDataPlane::AdmitContribution(ContributionHeader header,
                                                                       uint64_t payload_bytes,
                                                                       const SessionCaller& caller) {
  const auto admit = [&]() -> absl::StatusOr<AdmittedContribution> {
    PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, header.key));
    const SessionSpec& spec = session->spec();
    PRECONDOR_RETURN_IF_ERROR(CheckRole(spec, session->context().methods.of(header.key.layer), header));
    PRECONDOR_RETURN_IF_ERROR(CheckTensors(spec, header, payload_bytes));
    PRECONDOR_RETURN_IF_ERROR(session->layer(header.key.layer)->Check(header));
    const double most = session->context().methods.of(header.key.layer).traits().max_gradient_norm();
    const IncomingFacts facts(header, payload_bytes, std::isfinite(most),
                              !session->context().shard->options.ring_device.empty());
    return AdmittedContribution(std::move(header), payload_bytes, facts, session->shared_context());
  };
  absl::StatusOr<AdmittedContribution> admitted = admit();
  if (!admitted.ok()) CountRefusal(header, admitted.status());
  return admitted;
}

void ShardDataPlane::CountRefusal(const ContributionHeader& header, const absl::Status& why) {
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = sessions_.Find(header.key.session_id);
  LayerDriver* const layer = session.ok() ? (*session)->layer(header.key.layer) : nullptr;
  if (layer != nullptr) return layer->CountRefusal(header.kind, why);
  shard_.layer_observer.OnRejected(session.ok() ? (*session)->spec().name : "", header.kind, GetErrorReason(why));
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
  if (!session.ok()) {
    CountRefusal(header, session.status());
    return ack(session.status());
  }
  (*session)->layer(header.key.layer)->Submit(std::move(contribution), std::move(payload), ack, std::move(result));
}

// --- ranks -----------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<ShardSession>> ShardDataPlane::FindFor(const SessionCaller& caller,
                                                                      const ContributionKey& key) const {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<ShardSession> session, sessions_.Find(key.session_id));
  if (!session->context().access.IsShownBy(caller)) return NotTheirs(key.session_id);
  // The session may have been installed after the stream's check. Its ranks must send a RESUME before all else.
  if (caller.stream_generation.has_value()) {
    PRECONDOR_RETURN_IF_ERROR(CheckNotInstalledAfter(*caller.stream_generation, session->context()));
  }
  PRECONDOR_RETURN_IF_ERROR(session->holders().Check(key));
  const SessionSpec& spec = session->spec();
  if (key.layer >= spec.layers.size()) {
    return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownLayer,
                          absl::StrCat(DescribeKey(spec, key), ": expected a layer below ", spec.layers.size()));
  }
  if (session->layer(key.layer) == nullptr) {
    return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotOwner,
                          absl::StrCat(DescribeKey(spec, key), ": another shard owns the layer"));
  }
  return session;
}

absl::StatusOr<std::set<uint32_t>> ShardDataPlane::MissingRanks(const ContributionKey& key,
                                                                const SessionCaller& caller) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, key));
  return session->layer(key.layer)->MissingRanks(key.step);
}

absl::StatusOr<uint64_t> ShardDataPlane::Resume(const RankResume& resume, const SessionCaller& caller) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindFor(caller, resume.key));
  return session->layer(resume.key.layer)->Resume(resume);
}

void ShardDataPlane::Fetch(const ContributionKey& key, ResultFn result, const SessionCaller& caller) {
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindFor(caller, key);
  if (!session.ok()) return result(session.status());
  if (WorkersPrecondition((*session)->spec())) return (*session)->layer(key.layer)->Fetch(key, std::move(result));
  const std::shared_ptr<std::atomic<bool>> fetching = (*session)->shared_context()->fetching;
  if (fetching->exchange(true)) {
    return result(ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                                 absl::StrCat(DescribeKey((*session)->spec(), key),
                                              ": FETCH: expected one at a time in "
                                              "a session whose workers keep no factors")));
  }
  // One answer of a session is in memory at a time, until the last byte has been written.
  (*session)->layer(key.layer)->Fetch(
      key, [fetching, result = std::move(result)](absl::StatusOr<GradientResult> answer) {
        if (!answer.ok() || answer->bytes == nullptr) {
          *fetching = false;
        } else {
          answer->bytes =
              std::shared_ptr<const Payload>(answer->bytes.get(), [bytes = answer->bytes, fetching](auto*) mutable {
                bytes = nullptr;
                *fetching = false;
              });
        }
        result(std::move(answer));
      });
}

}  // namespace precondor
