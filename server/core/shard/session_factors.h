// SPDX-License-Identifier: Apache-2.0
// Whether a session holds its factors on this shard, and the memory that is reserved for it. In first order factors
// are of no use: their memory goes back to the shard, once the journal has them on its disk. A return to second order
// goes on with those, bit for bit; with fresh ones where there is no journal, or it lost them, which is logged.
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
#include "server/core/shard/session_context.h"

namespace precondor {

// Orders what coordinators say of a session's factors, also where one takes over from another.
struct HoldVersion {
  uint64_t leader = 0;  // its fencing token
  uint64_t number = 0;  // FactorHold::version
  auto operator<=>(const HoldVersion&) const = default;
};

// Thread-safe. Layers are changed on their strands, after what is queued there; a reservation shrinks when the last of
// them has let go and what the journal keeps is on the disk. Lock order: mu_ is a leaf.
class SessionFactors : public std::enable_shared_from_this<SessionFactors> {
 public:
  // Bytes that have been reserved, or are to be: with factors and without.
  struct Sizes {
    DeviceBytes held;
    DeviceBytes released;
  };
  // How it stands, for another set of layers to go on from.
  struct FactorState {
    bool held = false;
    DeviceBytes reserved = {};
    HoldVersion version = {};
    uint64_t eviction_id = 0;  // the last
    uint64_t writing = 0;      // the eviction that is not durable yet; its memory counts as if it were held
    bool operator==(const FactorState&) const = default;
  };
  // `layers`: all that the session has here. Those hold their states when `state` says so. That size has been
  // reserved, or the greater one while an eviction is being written; `state.reserved` is not looked at.
  SessionFactors(std::shared_ptr<SessionContext> context, std::vector<std::shared_ptr<LayerDriver>> layers,
                 const Sizes& sizes, const FactorState& state);

  // The greatest version is the one that counts: one that is not greater than any before changes nothing. Errors of
  // Hold, and nothing has changed: ResourceExhausted CAPACITY, those of Method::MakeState, Unavailable while another
  // Hold is under way or layers have yet to let go for a journal.
  absl::Status Hold(HoldVersion version);
  void Release(HoldVersion version);
  // Gives back what is reserved for released factors, if they have become durable meanwhile.
  void FreeReleased();

  // `released`, by layer: factors of their evictions that the journal may not hold. The layers have been replayed and
  // serve no rank yet: puts the reservation right, and sees to it that what was released becomes durable. A change that
  // only some of the layers had come to ends with factors for all; with none, and those there were kept, when the
  // memory is no longer reserved.
  void FinishReplay(std::map<uint32_t, std::string> released);

  // Unavailable while factors are being made or taken away.
  absl::StatusOr<FactorState> state() const;
  // Ends like Close, unless it stands otherwise by now.
  bool HandOver(const FactorState& expected);

  bool held() const;
  int64_t reserved_bytes() const;  // on all devices
  // The session ends: returns what is still reserved, for the caller to release.
  DeviceBytes Close();

 private:
  // What the layers let go of, as it comes.
  struct EvictionBatch {
    bool reserved = true;  // their memory is
    Mutex mu;
    ReleasedFactors factors ABSL_GUARDED_BY(mu);
    size_t left ABSL_GUARDED_BY(mu) = 0;
  };
  // A layer's factors for a return, and the eviction that they are of; 0: fresh ones.
  struct Returned {
    LayerDriver* layer = nullptr;
    std::unique_ptr<LayerState> state;
    uint64_t eviction_id = 0;
  };
  absl::StatusOr<Returned> MakeState(LayerDriver& layer) const;
  absl::StatusOr<std::vector<Returned>> MakeStates() const;
  // Has the layers take them, and tells.
  void Give(std::vector<Returned> states) const;
  // Of the next eviction: no number is used twice, also where the log has lost the earlier ones.
  uint64_t NextEvictionId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict(uint64_t eviction_id, bool reserved);
  void OnEvicted(const LayerDriver& layer, EvictionBatch& leaving, absl::StatusOr<std::string> state);
  // The last layer has let go.
  void Keep(ReleasedFactors factors, bool reserved);
  void FinishRelease();
  // Hands over what was released before the shard ended; returns the eviction, or 0: nothing.
  uint64_t KeepReplayed(std::map<uint32_t, std::string> released) const;
  // Gives factors to the layers that have none. False: they cannot be made.
  bool CompleteReplay();
  DeviceBytes NoBytes() const { return {std::vector<int64_t>(sizes_.held.of.size())}; }
  DeviceBytes factor_bytes() const { return sizes_.held - sizes_.released; }
  void Tell(int64_t reserved_bytes) const;

  const std::shared_ptr<SessionContext> context_;
  const std::vector<std::shared_ptr<LayerDriver>> layers_;
  const Sizes sizes_;

  mutable Mutex mu_;
  bool held_ ABSL_GUARDED_BY(mu_);
  DeviceBytes reserved_ ABSL_GUARDED_BY(mu_);  // what is being released counts until it is gone
  HoldVersion version_ ABSL_GUARDED_BY(mu_);
  uint64_t eviction_id_ ABSL_GUARDED_BY(mu_);
  bool holding_ ABSL_GUARDED_BY(mu_) = false;
  bool letting_go_ ABSL_GUARDED_BY(mu_) = false;  // layers have yet to, and there is a journal
  uint64_t writing_ ABSL_GUARDED_BY(mu_);         // see FactorState
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
