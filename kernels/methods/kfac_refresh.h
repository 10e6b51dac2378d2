// SPDX-License-Identifier: Apache-2.0
// A decomposition of method kfac that is made beside the steps: the factors of one statistic step, and what becomes of
// them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/methods/kfac_config.h"
#include "kernels/methods/kfac_decomposition.h"

namespace precondor {

// Thread-safe. All memory is allocated at once, so that none can be missing later but scratch.
class KfacRefresh {
 public:
  // Factors are to be written to the views; `damping` is that of their step. `backend` outlives it.
  static absl::StatusOr<std::shared_ptr<KfacRefresh>> Make(const KfacConfig& config, const LayerSpec& layer,
                                                           double damping, Backend& backend);
  static int64_t Bytes(const KfacConfig& config, const LayerSpec& layer);

  // Packed. Not to be written once Run may have been called.
  MatrixView in_factor() { return in_.view(); }
  MatrixView out_factor() { return out_.view(); }

  // Decomposes, unless that was done before; waits where another thread is at it. The errors of
  // KfacDecomposition::Decompose; after one that the device is to blame for the next call tries again.
  absl::Status Run();
  // After Run was OK.
  KfacDecomposition& made() { return made_; }

 private:
  KfacRefresh(const KfacConfig& config, double damping, Backend& backend)
      : config_(config), damping_(damping), backend_(backend) {}
  bool Runs();
  void AwaitOther();

  const KfacConfig config_;
  const double damping_;
  Backend& backend_;
  DeviceMatrix in_;
  DeviceMatrix out_;
  KfacDecomposition made_;  // of the thread that runs_, then of the owner

  Mutex mu_;
  CondVar ran_;
  bool runs_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
