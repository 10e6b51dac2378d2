// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/soap_config.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

int64_t SoapSides::FactorElements() const {
  int64_t sum = 0;
  for (size_t mode = 0; mode < sizes.size(); ++mode) sum += has_factor[mode] ? sizes[mode] * sizes[mode] : 0;
  return sum;
}

std::string SoapSides::Text() const {
  std::string text;
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    absl::StrAppend(&text, mode > 0 ? ", " : "", sizes[mode], has_factor[mode] ? "" : " without factor");
  }
  return text;
}

SoapSides SoapConfig::Sides(const LayerSpec& layer) const {
  const bool any = precondition_1d || TensorDims(layer).size() > 1;
  SoapSides sides;
  sides.sizes = merging.Sides(layer, max_factor_dim);
  for (const int64_t size : sides.sizes) sides.has_factor.push_back(any && size > 1 && size <= max_factor_dim);
  return sides;
}

SoapConfig ReadSoapConfig(OptionReader& reader) {
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

absl::StatusOr<SoapConfig> ParseSoapConfig(const MethodConfig& config) {
  OptionReader reader(config);
  SoapConfig out = ReadSoapConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  return out;
}

}  // namespace precondor
