// SPDX-License-Identifier: Apache-2.0
// The registry of methods, one explicit table, and the methods of a session's layers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/method_traits.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"

namespace precondor {

// Makes a method from its configuration. Returns NotFound, with the known methods, for an unknown method, and
// InvalidArgument, with the option, the expected values and the actual value, for a bad or unknown option.
absl::StatusOr<std::unique_ptr<Method>> MakeMethod(const MethodConfig& config);

// Returns every option that the method's parser reads. Returns NotFound, with the known methods, for an unknown method.
absl::StatusOr<std::vector<OptionInfo>> MethodOptions(absl::string_view method);

// Returns the names of all methods, in the table's order. Conformance tests run over them.
std::vector<absl::string_view> MethodNames();

// Returns the traits of all methods, in the table's order.
std::vector<MethodTraits> AllMethodTraits();

// Returns false for methods that work from gradients alone: Method::needs_statistics, for callers that hold no methods.
// Precondition: the layer exists, and its method is one of MethodNames().
bool TakesStatistics(const SessionSpec& spec, int64_t layer);

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
