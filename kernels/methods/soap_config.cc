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

absl::StatusOr<SoapConfig> ParseSoapConfig(const MethodConfig& config) {
  OptionReader reader(config);
  SoapConfig out = ReadSoapConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  return out;
}

}  // namespace precondor
