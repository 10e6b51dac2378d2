// SPDX-License-Identifier: Apache-2.0
// Every method, in one explicit table.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/method_traits.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"

namespace precondor {

// A method from its configuration. NotFound names the known methods; InvalidArgument names the option, what was
// expected and what came. Unknown options are errors.
absl::StatusOr<std::unique_ptr<Method>> MakeMethod(const MethodConfig& config);

// Every option that the method's parser reads. NotFound names the known methods.
absl::StatusOr<std::vector<OptionInfo>> MethodOptions(absl::string_view method);

// Names of all methods, in the table's order; conformance tests run over it.
std::vector<absl::string_view> MethodNames();

// The traits of all methods, in the table's order.
std::vector<MethodTraits> AllMethodTraits();

// False for methods that work from gradients alone: Method::needs_statistics, for callers that hold no methods. The
// layer exists, and its method is one of MethodNames().
bool TakesStatistics(const SessionSpec& spec, int64_t layer);

}  // namespace precondor
