// SPDX-License-Identifier: Apache-2.0
// Decides whether a session holds its factors on this shard, and tracks the memory reserved for it. Factors are not
// used in first order, so their memory is freed once the journal has made them durable. A return to second order
// restores exactly these factors. It begins with fresh ones if the shard has no journal or the journal has lost them,
// which is logged.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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
// when all layers have released their factors and the journal has made them durable. mu_ is a leaf lock.
class SessionFactors : public std::enable_shared_from_this<SessionFactors> {
 public:
  // Bytes to reserve, with and without factors.
  struct Sizes {
    DeviceBytes held;
    DeviceBytes released;
  };
  // `layers` are all of the session's layers on this shard. Precondition: they have factors if and only if `held`, and
  // the caller has reserved `sizes.held` if `held`, else `sizes.released`.
  SessionFactors(std::shared_ptr<SessionContext> context, std::vector<std::shared_ptr<LayerDriver>> layers,
                 const Sizes& sizes, bool held);

  // Hold reserves the memory of the factors and gives them back to the layers. Release takes the factors away. Both do
  // nothing unless `version` is greater than that of every earlier call. Hold returns RESOURCE_EXHAUSTED (CAPACITY),
  // the errors of Method::MakeState, or UNAVAILABLE if another Hold is in progress or layers still have to save evicted
  // factors for the journal. Nothing has changed after an error.
  absl::Status Hold(HoldVersion version);
  void Release(HoldVersion version);
  // Frees the reservation of released factors if they have become durable.
  void FreeReleased();

  // Precondition: the layers have been replayed and serve no rank yet. `released` has, by layer, evicted factors that
  // the journal may not hold. Corrects the reservation and hands `released` to the journal. If the shard ended when
  // only some layers had released or regained their factors, gives factors to all layers. If that fails for lack of
  // memory, evicts the factors of all layers; the journal keeps them.
  void FinishReplay(std::map<uint32_t, std::string> released);

  bool held() const;
  int64_t reserved_bytes() const;  // sum over all devices
  // Ends the session. Returns the bytes that are still reserved, which the caller must release.
  DeviceBytes Close();

 private:
  // One eviction: collects the saved factors of the layers as they arrive.
  struct EvictionBatch {
    bool reserved = true;  // whether the memory of the factors is reserved
    Mutex mu;
    ReleasedFactors factors ABSL_GUARDED_BY(mu);
    size_t left ABSL_GUARDED_BY(mu) = 0;
  };
  // Factors to give to a layer. `eviction_id` is the eviction that saved them; 0 means fresh factors.
  struct Returned {
    LayerDriver* layer = nullptr;
    std::unique_ptr<LayerState> state;
    uint64_t eviction_id = 0;
  };
  absl::StatusOr<Returned> MakeState(LayerDriver& layer) const;
  absl::StatusOr<std::vector<Returned>> MakeStates() const;
  // Gives the factors to the layers, and reports and logs how many are fresh.
  void Give(std::vector<Returned> states) const;
  // Returns a number for the next eviction. No number is used twice, even if the log has lost earlier ones.
  uint64_t NextEvictionId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict(uint64_t eviction_id, bool reserved);
  void OnEvicted(const LayerDriver& layer, EvictionBatch& leaving, absl::StatusOr<std::string> state);
  // Hands the factors to the journal after the last layer has released its own. `reserved`: see EvictionBatch.
  void Keep(ReleasedFactors factors, bool reserved);
  void FinishRelease();
  // Hands factors that were released before the shard restarted to the journal. Returns their eviction, or 0 if there
  // are none.
  uint64_t KeepReplayed(std::map<uint32_t, std::string> released) const;
  // Gives factors to the layers that have none. Returns false if they cannot be made.
  bool CompleteReplay();
  DeviceBytes NoBytes() const { return {std::vector<int64_t>(sizes_.held.of.size())}; }
  DeviceBytes factor_bytes() const { return sizes_.held - sizes_.released; }
  void ReportMemory(int64_t reserved_bytes) const;

  const std::shared_ptr<SessionContext> context_;
  const std::vector<std::shared_ptr<LayerDriver>> layers_;
  const Sizes sizes_;

  mutable Mutex mu_;
  bool held_ ABSL_GUARDED_BY(mu_);
  DeviceBytes reserved_ ABSL_GUARDED_BY(mu_);  // includes factors that are being released
  HoldVersion version_ ABSL_GUARDED_BY(mu_);
  uint64_t eviction_id_ ABSL_GUARDED_BY(mu_) = 0;  // of the last eviction
  // True while Hold makes factors.
  bool holding_ ABSL_GUARDED_BY(mu_) = false;
  // True while layers still have to save evicted factors for the journal.
  bool evicting_ ABSL_GUARDED_BY(mu_) = false;
  // Eviction that is not durable yet, or 0; its memory still counts as held.
  uint64_t writing_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
