// SPDX-License-Identifier: Apache-2.0
// Memory that a session needs on a shard, as a sound bound that is known before anything is allocated.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/method_set.h"

namespace precondor {

inline constexpr int kDefaultWindowSteps = 2;

// Bytes; sums saturate at 2^62 instead of overflowing.
struct Reservation {
  int64_t states = 0;   // factors at their fullest
  int64_t scratch = 0;  // device and host buffers of the operations that may run at once
  int64_t staging = 0;  // contributions and results of the steps in the window
  int64_t total() const;
};

// The bound for layers of one device, one after the other; ComputeReservation says what of. Borrows its arguments.
class ReservationSum {
 public:
  ReservationSum(const SessionSpec& spec, const MethodSet& methods, int window_steps, int parallelism);
  void Include(uint32_t layer);
  Reservation reservation() const;

 private:
  const SessionSpec* spec_;
  const MethodSet* methods_;
  int window_steps_;
  int parallelism_;
  int64_t layers_ = 0, states_ = 0, staging_ = 0;
  int64_t statistics_ = 0, gradient_ = 0, method_scratch_ = 0, deferred_scratch_ = 0;  // of the widest
};

// Of the given layers on one device, whose executor runs `parallelism` of them at once. Staging per layer: statistics
// of W workers as f32 for window_steps + 1 steps (a step that left the window may still be waiting for its update); for
// window_steps steps the gradients of those who send them, which is also where results go, and the f64 accumulator when
// more than one sends. Where workers have factors themselves, no gradients, but what pulls are answered with: for
// window_steps steps merged vectors as f32 in REPLAY, states in PULL_FACTORS; and two more states, one that is being
// saved and one that is being fetched.
Reservation ComputeReservation(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism);

// Of the same in first order: gradients, and what averages them; nothing where workers have them.
Reservation ComputeFirstOrderReservation(const SessionSpec& spec, absl::Span<const uint32_t> layers, int window_steps,
                                         int parallelism);

// Floats on the device that one layer's statistics of a step are merged in.
int64_t StatisticsScratchElements(const SessionSpec& spec, uint32_t layer);
// One layer's statistics of a step, of all workers, as they come.
int64_t StatisticsBytes(const SessionSpec& spec, uint32_t layer);

// States and staging of one layer, for placement.
int64_t LayerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps);

// Ranks that send a layer's gradient, or pull in its place: world_size, or 1 in DELEGATE.
int64_t GradientContributors(const SessionSpec& spec);

}  // namespace precondor
