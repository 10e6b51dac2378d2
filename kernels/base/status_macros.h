// SPDX-License-Identifier: Apache-2.0
// Early return for absl::Status and absl::StatusOr.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the status of `expr` from the function if it is not OK.
#define PRECONDOR_RETURN_IF_ERROR(expr)                                                               \
  do {                                                                                                \
    if (::absl::Status precondor_status_ = (expr); !precondor_status_.ok()) return precondor_status_; \
  } while (false)

// PRECONDOR_ASSIGN_OR_RETURN(auto x, F()): sets x = *F(), or returns its status from the function.
#define PRECONDOR_ASSIGN_OR_RETURN(lhs, expr) \
  PRECONDOR_ASSIGN_OR_RETURN_IMPL_(PRECONDOR_CONCAT_(precondor_statusor_, __LINE__), lhs, expr)
#define PRECONDOR_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                     \
  if (!statusor.ok()) return statusor.status();               \
  lhs = *std::move(statusor)
#define PRECONDOR_CONCAT_(a, b) PRECONDOR_CONCAT_INNER_(a, b)
#define PRECONDOR_CONCAT_INNER_(a, b) a##b
