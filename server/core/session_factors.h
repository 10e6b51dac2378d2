// SPDX-License-Identifier: Apache-2.0
// Whether a session holds its factors on this shard, and the memory that is reserved for it. In first order factors
// are of no use: their memory goes back to the shard, and a return to second order begins with fresh ones.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "server/core/layer_pipeline.h"
#include "server/core/session_context.h"

namespace precondor {

// Thread-safe. Layers are changed on their strands, after what is queued there; a reservation shrinks when the last of
// them has let go. Lock order: mu_ is a leaf.
class SessionFactors : public std::enable_shared_from_this<SessionFactors> {
 public:
  // Bytes that have been reserved, or are to be: with factors and without.
  struct Sizes {
    int64_t held = 0;
    int64_t released = 0;
  };
  // `layers`: all that the session has here. Those hold their states when `held`, and that size has been reserved.
  // `version`: the greatest that the session has heard of.
  SessionFactors(std::shared_ptr<SessionContext> context, std::vector<std::shared_ptr<LayerPipeline>> layers,
                 Sizes sizes, bool held, uint64_t version = 0);

  // The greatest version is the one that counts: one that is not greater than any before changes nothing. Errors of
  // Hold, and nothing has changed: ResourceExhausted CAPACITY, those of Method::MakeState, Unavailable while another
  // Hold is under way.
  absl::Status Hold(uint64_t version);
  void Release(uint64_t version);

  // The layers have been replayed and serve nobody yet: puts the reservation right. When one of them has no factors, or
  // their memory is not there any more, none keeps any: whoever asked for them has not been told that they are there.
  void FinishReplay();

  // How it stands, for another set of layers to go on from. Unavailable while factors are being made.
  struct Standing {
    bool held = false;
    int64_t reserved = 0;
    uint64_t version = 0;
    bool operator==(const Standing&) const = default;
  };
  absl::StatusOr<Standing> standing() const;
  // Ends like Close, unless it stands otherwise by now.
  bool HandOver(const Standing& expected);

  bool held() const;
  int64_t reserved_bytes() const;
  // The session ends: returns what is still reserved, for the caller to release.
  int64_t Close();

 private:
  absl::StatusOr<std::vector<std::unique_ptr<LayerState>>> MakeStates() const;
  void FinishRelease();
  int64_t factor_bytes() const { return sizes_.held - sizes_.released; }
  void Tell(int64_t reserved_bytes) const;

  const std::shared_ptr<SessionContext> context_;
  const std::vector<std::shared_ptr<LayerPipeline>> layers_;
  const Sizes sizes_;

  mutable Mutex mu_;
  bool held_ ABSL_GUARDED_BY(mu_);
  int64_t reserved_ ABSL_GUARDED_BY(mu_);  // what is being released counts until it is gone
  uint64_t version_ ABSL_GUARDED_BY(mu_);
  bool holding_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
