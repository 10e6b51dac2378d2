// SPDX-License-Identifier: Apache-2.0
// Options of method soap; docs/use/methods/soap.md has the formulas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/product_precision.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/options.h"
#include "kernels/methods/tensor.h"

namespace precondor {

enum class SoapRule : uint8_t { kSoap, kShampoo };

// The dimensions of a layer as the method preconditions it, and which of them have a factor.
struct SoapSides {
  std::vector<int64_t> sizes;
  std::vector<bool> has_factor;

  int64_t elements() const { return ElementsOf(sizes); }
  // Elements of one square matrix for each factor.
  int64_t FactorElements() const;
  // Returns a text such as "64, 3, 9000 without factor".
  std::string Text() const;
};

struct SoapConfig {
  SoapRule rule = SoapRule::kSoap;
  double momentum = 0.95;             // beta1
  double second_moment_decay = 0.95;  // SOAP: beta2
  double covariance_decay = 0.95;
  double epsilon = 1e-8;  // SOAP: added to the root of the second moment; SHAMPOO: relative to the largest eigenvalue
  int64_t refresh_interval = 10;  // gradients between two refreshes of the bases or roots
  int64_t max_factor_dim = 8192;  // longer sides have no factor
  bool precondition_1d = false;   // whether tensors of one dimension have a factor
  DimMerging merging = {};
  // Precision of the products with gradients, moments and answers; by default TF32 on a backend with tensor cores, and
  // f32 on others. Bases are computed in f32 or more.
  std::optional<ProductPrecision> precision;

  ProductPrecision PrecisionOn(const Backend& backend) const {
    return precision.value_or(backend.has_tensor_cores() ? ProductPrecision::kTf32 : ProductPrecision::kF32);
  }
  SoapSides Sides(const LayerSpec& layer) const;
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
SoapConfig ReadSoapConfig(OptionReader& reader);
// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<SoapConfig> ParseSoapConfig(const MethodConfig& config);

}  // namespace precondor
