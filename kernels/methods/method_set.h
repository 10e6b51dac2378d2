// SPDX-License-Identifier: Apache-2.0
// The methods of a session's layers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/registry.h"

namespace precondor {

// How a method is made: the registry in servers, fakes in tests. Errors are those of MakeMethod. Thread-safe.
using MethodFactory = std::function<absl::StatusOr<std::unique_ptr<Method>>(const MethodConfig&)>;

// Immutable after construction; safe from any thread.
class MethodSet {
 public:
  // `spec` is valid. Errors: the factory's; InvalidArgument names a layer whose statistics its method does not take, or
  // a method whose factors workers cannot hold, in a session where they do.
  static absl::StatusOr<MethodSet> Make(const SessionSpec& spec, const MethodFactory& make = MakeMethod);

  const Method& of(int64_t layer) const { return *methods_[of_layer_[static_cast<size_t>(layer)]]; }

  // Each once: the session's own, then those of its exceptions in their order.
  const std::vector<std::unique_ptr<Method>>& all() const { return methods_; }

 private:
  std::vector<std::unique_ptr<Method>> methods_;
  std::vector<uint32_t> of_layer_;  // index in methods_
};

}  // namespace precondor
