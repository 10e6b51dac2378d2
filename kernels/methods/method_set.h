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

// Makes a method: the registry in servers, fakes in tests. Errors are those of MakeMethod. Thread-safe.
using MethodFactory = std::function<absl::StatusOr<std::unique_ptr<Method>>(const MethodConfig&)>;

// The methods of one session. Immutable after construction; safe from any thread.
class MethodSet {
 public:
  // Precondition: `spec` is valid. Returns the factory's errors. Returns InvalidArgument, with the layer, if its method
  // does not take its statistics, and, with the method, if workers cannot hold its factors in a session in which they
  // do.
  static absl::StatusOr<MethodSet> Make(const SessionSpec& spec, const MethodFactory& make = MakeMethod);

  const Method& of(int64_t layer) const { return *methods_[of_layer_[static_cast<size_t>(layer)]]; }

  // The session's own method, then those of its exceptions in their order, each once.
  const std::vector<std::unique_ptr<Method>>& all() const { return methods_; }

 private:
  std::vector<std::unique_ptr<Method>> methods_;
  std::vector<uint32_t> of_layer_;  // index in methods_
};

}  // namespace precondor
