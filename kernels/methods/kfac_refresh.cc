// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kfac_refresh.h"

#include "kernels/base/fiber.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/kfac_side.h"

namespace precondor {

absl::StatusOr<std::shared_ptr<KfacRefresh>> KfacRefresh::Make(const KfacConfig& config, const LayerSpec& layer,
                                                               double damping, Backend& backend) {
  std::shared_ptr<KfacRefresh> refresh(new KfacRefresh(config, damping, backend));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->in_, backend.Allocate(1, KfacSide::PackedElements(layer.d_in)));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->out_, backend.Allocate(1, KfacSide::PackedElements(layer.d_out)));
  PRECONDOR_ASSIGN_OR_RETURN(refresh->made_, KfacDecomposition::Allocate(config, layer, backend));
  return refresh;
}

int64_t KfacRefresh::Bytes(const KfacConfig& config, const LayerSpec& layer) {
  return KfacSide::StateBytes(layer.d_in) + KfacSide::StateBytes(layer.d_out) + KfacDecomposition::Bytes(config, layer);
}

void KfacRefresh::AwaitOther() {
  MutexLock lock(mu_);
  while (runs_) ran_.wait(mu_);
}

bool KfacRefresh::Runs() {
  MutexLock lock(mu_);
  return runs_;
}

absl::Status KfacRefresh::Run() {
  // Lets the device's other layers continue while this one waits for another thread.
  if (Runs()) RunBlocking([this] { AwaitOther(); });
  MutexLock lock(mu_);
  while (runs_) ran_.wait(mu_);
  if (outcome_.has_value()) return *outcome_;
  runs_ = true;
  mu_.Unlock();
  absl::Status status = made_.Decompose(config_, damping_, in_.view(), out_.view(), backend_);
  mu_.Lock();
  runs_ = false;
  if (status.ok() || absl::IsFailedPrecondition(status)) outcome_ = status;
  ran_.notify_all();
  return status;
}

}  // namespace precondor
