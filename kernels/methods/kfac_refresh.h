// SPDX-License-Identifier: Apache-2.0
// A deferred decomposition of method kfac: the factors of one statistic step, and the decomposition that a background
// thread makes of them.
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

// Owns the factors and their decomposition. Thread-safe. Make allocates all memory except scratch, so that none of it
// can be lacking later.
class KfacRefresh {
 public:
  // Allocates a refresh. The caller must then write the factors to in_factor() and out_factor(). `damping` is that of
  // their step. `backend` must outlive the refresh.
  static absl::StatusOr<std::shared_ptr<KfacRefresh>> Make(const KfacConfig& config, const LayerSpec& layer,
                                                           double damping, Backend& backend);
  static int64_t Bytes(const KfacConfig& config, const LayerSpec& layer);

  // Packed factors. Do not write to them once Run may have been called.
  MatrixView in_factor() { return in_.view(); }
  MatrixView out_factor() { return out_.view(); }

  // Decomposes the factors unless that is done; waits if another thread is decomposing. Returns the errors of
  // KfacDecomposition::Decompose. After an error of the device, the next call tries again.
  absl::Status Run();
  // Precondition: Run has returned OK.
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
  KfacDecomposition made_;  // used by the thread in Run, then by the owner

  Mutex mu_;
  CondVar ran_;
  bool runs_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
