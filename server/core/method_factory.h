// SPDX-License-Identifier: Apache-2.0
// How core gets methods: the registry in servers, fakes in tests.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"

namespace precondor {

// Errors are those of MakeMethod (kernels/methods/registry.h). Thread-safe.
using MethodFactory = std::function<absl::StatusOr<std::unique_ptr<Method>>(const MethodConfig&)>;

}  // namespace precondor
