// SPDX-License-Identifier: Apache-2.0
// Decides whether a session holds its factors on this shard, and tracks the memory reserved for it. Factors are not
// used in first order, so they are dropped and their memory is freed. A return to second order begins with fresh ones.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/mutex.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/resources/session_context.h"

namespace precondor {

// Orders the hold and release requests of coordinators for a session, also across a change of the leader.
struct HoldVersion {
  uint64_t leader = 0;  // fencing token of the coordinator
  uint64_t number = 0;  // FactorHold::version
  auto operator<=>(const HoldVersion&) const = default;
};

// Thread-safe. Factors are changed on the layers' strands, after the work that is queued there. The reservation shrinks
// when all layers have dropped their factors. mu_ is a leaf lock.
class SessionFactors : public std::enable_shared_from_this<SessionFactors> {
 public:
  // Bytes to reserve, with and without factors.
  struct Sizes {
    int64_t held = 0;
    int64_t released = 0;
  };
  // `layers` are all of the session's layers on this shard. Precondition: they have factors if and only if `held`, and
  // the caller has reserved `sizes.held` if `held`, else `sizes.released`.
  SessionFactors(std::shared_ptr<SessionContext> context, std::vector<std::shared_ptr<LayerDriver>> layers,
                 const Sizes& sizes, bool held);

  // Hold reserves the memory of the factors and gives fresh ones to the layers. Release drops the factors. Both do
  // nothing unless `version` is greater than that of every earlier call. Hold returns RESOURCE_EXHAUSTED (CAPACITY),
  // the errors of Method::MakeState, or UNAVAILABLE if another Hold is in progress or layers still have to drop their
  // factors. Nothing has changed after an error.
  absl::Status Hold(HoldVersion version);
  void Release(HoldVersion version);

  // Precondition: the layers have been replayed and serve no rank yet. Corrects the reservation. If the shard ended
  // when only some layers had dropped or been given factors, all drop theirs: the coordinator, which has no answer to
  // its call, repeats it.
  void FinishReplay();

  bool held() const;
  int64_t reserved_bytes() const;
  // Ends the session. Returns the bytes that are still reserved, which the caller must release.
  int64_t Close();

 private:
  using Layers = std::vector<std::shared_ptr<LayerDriver>>;

  // Gives fresh factors to the layers, or to none if it returns an error.
  absl::Status GiveFresh() const;
  // Drops the factors of all layers, and then frees their memory.
  void Drop();
  void FinishRelease();
  bool changing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return holding_ || releasing_; }
  int64_t factor_bytes() const { return sizes_.held - sizes_.released; }
  void ReportMemory(int64_t reserved_bytes) const;

  const std::shared_ptr<SessionContext> context_;
  const Layers layers_;
  const Sizes sizes_;

  mutable Mutex mu_;
  bool held_ ABSL_GUARDED_BY(mu_);
  int64_t reserved_ ABSL_GUARDED_BY(mu_);  // includes factors that are being dropped
  HoldVersion version_ ABSL_GUARDED_BY(mu_);
  bool holding_ ABSL_GUARDED_BY(mu_) = false;    // Hold makes factors
  bool releasing_ ABSL_GUARDED_BY(mu_) = false;  // layers still have to drop their factors
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
