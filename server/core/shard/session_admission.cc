// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/session_admission.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/payload.h"

namespace precondor {
namespace {

absl::Status Refusal(absl::StatusCode code, ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return ReasonedStatus(code, reason, absl::StrCat(DescribeKey(spec, key), ": ", what));
}

}  // namespace

absl::Status SessionAdmission::CheckKey(const ContributionKey& key) const {
  PRECONDOR_RETURN_IF_ERROR(session_.holders().Check(key));
  const SessionSpec& spec = session_.spec();
  if (key.layer >= spec.layers.size()) {
    return Refusal(absl::StatusCode::kNotFound, ErrorReason::kUnknownLayer, spec, key,
                   absl::StrCat("expected a layer below ", spec.layers.size()));
  }
  if (session_.layer(key.layer) == nullptr) {
    return Refusal(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotOwner, spec, key,
                   "another shard owns the layer");
  }
  return absl::OkStatus();
}

absl::StatusOr<AdmittedContribution> SessionAdmission::Admit(ContributionHeader& header, uint64_t payload_bytes) const {
  const SessionSpec& spec = session_.spec();
  PRECONDOR_RETURN_IF_ERROR(CheckKey(header.key));
  PRECONDOR_RETURN_IF_ERROR(CheckRole(spec, session_.context().methods.of(header.key.layer), header));
  PRECONDOR_RETURN_IF_ERROR(CheckTensors(spec, header, payload_bytes));
  PRECONDOR_RETURN_IF_ERROR(session_.layer(header.key.layer)->Check(header));
  return AdmittedContribution(std::move(header), payload_bytes, session_.shared_context());
}

}  // namespace precondor
