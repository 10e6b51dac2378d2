// SPDX-License-Identifier: Apache-2.0
// Options of method soap; docs/methods/soap.md has the formulas.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"

namespace precondor {

enum class SoapRule : uint8_t { kSoap, kShampoo };

struct SoapConfig {
  SoapRule rule = SoapRule::kSoap;
  double momentum = 0.95;             // beta1
  double second_moment_decay = 0.95;  // SOAP: beta2
  double covariance_decay = 0.95;     // of L and R
  double epsilon = 1e-8;              // SOAP: beside the root of the second moment; SHAMPOO: of the largest eigenvalue
  int64_t refresh_interval = 10;      // gradients between two refreshes of the bases or roots
  int64_t max_factor_dim = 8192;      // longer sides have no factor

  bool HasFactor(int64_t size) const { return size > 1 && size <= max_factor_dim; }
};

// InvalidArgument names the option, what was expected and what came.
absl::StatusOr<SoapConfig> ParseSoapConfig(const MethodConfig& config);

}  // namespace precondor
