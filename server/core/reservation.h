// SPDX-License-Identifier: Apache-2.0
// Memory that a session needs on a shard, as a sound bound that is known before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_set.h"
#include "server/core/contribution.h"
#include "server/core/layer/contributions.h"

namespace precondor {

inline constexpr int kDefaultWindowSteps = 2;

// Of two sums that are not negative; saturates at 2^62 instead of overflowing, as all sums here.
int64_t AddBytes(int64_t x, int64_t y);

// Bytes.
struct Reservation {
  int64_t states = 0;   // factors at their fullest
  int64_t scratch = 0;  // device and host buffers of the operations that may run at once
  int64_t staging = 0;  // contributions and results of the steps in the window
  int64_t total() const;
};

// Whether `ranks` devices that compute together have the layer's factors by rows, instead of one of them.
inline bool IsSplit(const Method& method, const LayerSpec& layer, int ranks) {
  return ranks > 1 && method.Splits(layer);
}

// The bounds for a session's layers on the devices of a shard, one layer after the other; ComputeReservation says what
// of. Of a layer that is split its device has its part of the factors, the scratch that goes with it and all the rest;
// the others have their parts, and their scratch for as many of its device's layers as may run there at once. Borrows
// its arguments.
class ReservationSums {
 public:
  // `parallelism`: by device. `ranks`: devices that compute together: all of them, or 1.
  ReservationSums(const SessionSpec& spec, const MethodSet& methods, int window_steps, std::vector<int> parallelism,
                  int ranks);
  void Include(size_t device, uint32_t layer);
  Reservation reservation(size_t device) const;

 private:
  // Of the layers that are on one device.
  struct Sum {
    int parallelism = 1;
    int64_t layers = 0, states = 0, staging = 0;
    int64_t statistics = 0, gradient = 0, method_scratch = 0, deferred_scratch = 0;  // of the widest
    int64_t all_scratch = 0;                                                         // of all layers together
    int64_t split_layers = 0, other_states = 0, other_scratch = 0;                   // on each other device
  };
  int64_t ScratchOfOne(int64_t statistics, int64_t gradient, int64_t method) const;

  const SessionSpec* spec_;
  const MethodSet* methods_;
  int window_steps_;
  int ranks_;
  std::vector<Sum> sums_;
};

// Of the given layers on a shard's only device, whose executor runs `parallelism` of them at once. Scratch: each
// layer's own where all run at once, else the widest layer's `parallelism` times. Staging per layer:
// statistics of W workers as f32 for window_steps + 1 steps (a step that left the window may still be waiting for its
// update); for window_steps steps the gradients of those who send them, which is also where results go, and the f64
// accumulator when more than one sends. Where workers have factors themselves, no gradients, but what pulls are
// answered with: for window_steps steps merged vectors as f32 in REPLAY, states in PULL_FACTORS; and two more states,
// one that is being saved and one that is being fetched.
Reservation ComputeReservation(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism);

// Of the same in first order: gradients, and what averages them; nothing where workers have them.
Reservation ComputeFirstOrderReservation(const SessionSpec& spec, absl::Span<const uint32_t> layers, int window_steps,
                                         int parallelism);

// Floats on the device that one layer's statistics of a step are merged in; its gradient and the answer.
int64_t StatisticsScratchElements(const SessionSpec& spec, uint32_t layer);
int64_t GradientScratchElements(const SessionSpec& spec, uint32_t layer);

// Of one layer, on the device that it is on and on each of the others, with `ranks` as above: its state; state and
// staging, for placement.
Method::SplitBytes StateBytes(const Method& method, const LayerSpec& layer, int ranks);
Method::SplitBytes LayerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps,
                              int ranks);

// Ranks that send a layer's gradient, or pull in its place: world_size, or 1 in DELEGATE.
int64_t GradientContributors(const SessionSpec& spec);
// What a shard keeps of one rank's contribution, besides its payload.
inline constexpr int64_t kBytesPerContribution = Contributions::kBytesPerContributor + sizeof(StagedContribution);

}  // namespace precondor
