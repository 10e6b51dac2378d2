// SPDX-License-Identifier: Apache-2.0
// Errors that several files of the coordinator return.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor {

// Returns NOT_FOUND (UNKNOWN_SESSION). `which` is a quoted name or an id.
inline absl::Status NoSession(const absl::AlphaNum& which) {
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session ", which, ": there is none on this coordinator"));
}

// Returns `status` with `context` in front of its message if it is an error.
inline absl::Status AddContext(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return ReasonedStatus(status.code(), GetErrorReason(status), absl::StrCat(context, ": ", status.message()));
}

}  // namespace precondor
