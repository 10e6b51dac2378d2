// SPDX-License-Identifier: Apache-2.0
// Method soap: Adam in the eigenbasis of Shampoo's factors, or Shampoo itself, from gradients alone
// (docs/use/methods/soap.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/operation_kinds.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
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

// Reads every option. The reader keeps the first error; ParseOptions calls its Finish.
inline SoapConfig ReadSoapConfig(OptionReader& reader) {
  SoapConfig out;
  out.rule = static_cast<SoapRule>(reader.Choice("rule", 0, {"SOAP", "SHAMPOO"}));
  const bool shampoo = out.rule == SoapRule::kShampoo;
  out.momentum = reader.Number("momentum", shampoo ? 0.9 : out.momentum, 0, 0.9999);
  out.second_moment_decay = reader.Number("second_moment_decay", out.second_moment_decay, 0, 0.999999);
  out.covariance_decay = reader.Number("covariance_decay", out.covariance_decay, 0, 0.999999);
  out.epsilon = reader.OpenNumber("epsilon", shampoo ? 1e-6 : out.epsilon, 0, 1);
  out.refresh_interval = reader.Integer("refresh_interval", out.refresh_interval, 1, int64_t{1} << 20);
  out.max_factor_dim = reader.Integer("max_factor_dim", out.max_factor_dim, 0, kMaxDimension);
  out.precondition_1d = reader.Flag("precondition_1d", out.precondition_1d);
  out.merging = DimMerging::Read(reader);
  const int precision = reader.Choice("precision", 0, {"AUTO", "F32", "TF32"});
  if (precision > 0) out.precision = precision == 1 ? ProductPrecision::kF32 : ProductPrecision::kTf32;
  return out;
}

inline constexpr MethodTraits kSoapTraits = {.name = "soap", .learns_from_gradients = true, .whole_updates = true};

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeSoap(const MethodConfig& config);

}  // namespace precondor
