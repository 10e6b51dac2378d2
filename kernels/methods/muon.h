// SPDX-License-Identifier: Apache-2.0
// Method muon: the gradients' momentum, made nearly orthogonal by Newton-Schulz iterations (docs/use/methods/muon.md).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/operation_kinds.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"

namespace precondor {

// The factor that the orthogonal matrix is multiplied by.
enum class MuonScale : uint8_t {
  kMatchRmsAdamw,  // 0.2 sqrt(max(d_out, d_in)): elements have a root mean square of about 0.2, as AdamW's updates have
  kOriginal,       // sqrt(max(1, d_out / d_in))
};

struct MuonConfig {
  double momentum = 0.95;  // beta
  bool nesterov = true;
  int64_t ns_steps = 5;  // Newton-Schulz iterations
  MuonScale scale = MuonScale::kMatchRmsAdamw;
  // Added to the Frobenius norm by which the iteration's input is divided.
  double epsilon = 1e-7;
  // Whether the direction is multiplied by the inverse of the gradients' second moment along d_in.
  bool input_factor = false;
  double damping = 0.2;  // relative to the mean eigenvalue
  double covariance_decay = 0.95;
  int64_t refresh_interval = 10;  // gradients between two inverses
  int64_t max_factor_dim = 8192;  // layers with a longer d_in have no factor

  // Precision of the products; by default bf16 on a backend with tensor cores, and f32 on others.
  std::optional<ProductPrecision> precision;

  ProductPrecision PrecisionOn(const Backend& backend) const {
    return precision.value_or(backend.has_tensor_cores() ? ProductPrecision::kBf16 : ProductPrecision::kF32);
  }
  // Precision of the factor's products.
  ProductPrecision FactorPrecisionOn(const Backend& backend) const {
    return PrecisionOn(backend) == ProductPrecision::kF32 ? ProductPrecision::kF32 : ProductPrecision::kTf32;
  }
  bool HasFactor(const LayerSpec& layer) const { return input_factor && layer.d_in <= max_factor_dim; }
  // Whether a state holds the direction besides the momentum.
  bool HoldsDirection(const LayerSpec& layer) const { return nesterov || HasFactor(layer); }
  // Returns the factor that `scale` selects for this layer.
  double ScaleOf(const LayerSpec& layer) const;
};

// Reads every option. The reader keeps the first error; ParseOptions calls its Finish.
inline MuonConfig ReadMuonConfig(OptionReader& reader) {
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

inline constexpr MethodTraits kMuonTraits = {.name = "muon", .learns_from_gradients = true, .whole_updates = true};

// Errors: those of MakeMethod.
absl::StatusOr<std::unique_ptr<Method>> MakeMuon(const MethodConfig& config);

}  // namespace precondor
