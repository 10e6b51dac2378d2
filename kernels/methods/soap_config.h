// SPDX-License-Identifier: Apache-2.0
// Options of method soap; docs/methods/soap.md has the formulas.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/options.h"
#include "kernels/methods/tensor.h"

namespace precondor {

enum class SoapRule : uint8_t { kSoap, kShampoo };

// The dimensions of a layer as it is preconditioned, and which of them have a factor.
struct SoapSides {
  std::vector<int64_t> sizes;
  std::vector<bool> has_factor;

  int64_t elements() const { return ElementsOf(sizes); }
  // Of one square matrix for each factor.
  int64_t FactorElements() const;
  // "64, 3, 9000 without factor".
  std::string Text() const;
};

struct SoapConfig {
  SoapRule rule = SoapRule::kSoap;
  double momentum = 0.95;             // beta1
  double second_moment_decay = 0.95;  // SOAP: beta2
  double covariance_decay = 0.95;
  double epsilon = 1e-8;          // SOAP: beside the root of the second moment; SHAMPOO: of the largest eigenvalue
  int64_t refresh_interval = 10;  // gradients between two refreshes of the bases or roots
  int64_t max_factor_dim = 8192;  // longer sides have no factor
  bool precondition_1d = false;   // whether tensors of one dimension have one
  DimMerging merging = {};

  SoapSides Sides(const LayerSpec& layer) const;
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
SoapConfig ReadSoapConfig(OptionReader& reader);
// InvalidArgument names the option, what was expected and what came.
absl::StatusOr<SoapConfig> ParseSoapConfig(const MethodConfig& config);

}  // namespace precondor
