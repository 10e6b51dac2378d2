// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/muon_config.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/status_macros.h"

namespace precondor {

double MuonConfig::ScaleOf(const LayerSpec& layer) const {
  const auto d_out = static_cast<double>(layer.d_out), d_in = static_cast<double>(layer.d_in);
  if (scale == MuonScale::kOriginal) return std::sqrt(std::max(1.0, d_out / d_in));
  return 0.2 * std::sqrt(std::max(d_out, d_in));
}

MuonConfig ReadMuonConfig(OptionReader& reader) {
  MuonConfig out;
  out.momentum = reader.Number("momentum", out.momentum, 0, 0.9999);
  out.nesterov = reader.Flag("nesterov", out.nesterov);
  out.ns_steps = reader.Integer("ns_steps", out.ns_steps, 1, 20);
  out.scale = static_cast<MuonScale>(reader.Choice("scale", 0, {"MATCH_RMS_ADAMW", "ORIGINAL"}));
  out.epsilon = reader.Number("epsilon", out.epsilon, 0, 1);
  out.input_factor = reader.Flag("input_factor", out.input_factor);
  out.damping = reader.Number("damping", out.damping, 1e-3, 1e6);
  out.covariance_decay = reader.Number("covariance_decay", out.covariance_decay, 0, 0.999999);
  out.refresh_interval = reader.Integer("refresh_interval", out.refresh_interval, 1, int64_t{1} << 20);
  out.max_factor_dim = reader.Integer("max_factor_dim", out.max_factor_dim, 0, kMaxDimension);
  constexpr std::array<ProductPrecision, 3> kPrecisions = {ProductPrecision::kF32, ProductPrecision::kTf32,
                                                           ProductPrecision::kBf16};
  const int precision = reader.Choice("precision", 0, {"AUTO", "F32", "TF32", "BF16"});
  if (precision > 0) out.precision = kPrecisions[static_cast<size_t>(precision - 1)];
  return out;
}

absl::StatusOr<MuonConfig> ParseMuonConfig(const MethodConfig& config) {
  OptionReader reader(config);
  MuonConfig out = ReadMuonConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  return out;
}

}  // namespace precondor
