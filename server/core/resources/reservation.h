// SPDX-License-Identifier: Apache-2.0
// Upper bounds of the memory that a session needs on a shard, which are known before anything is allocated.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/registry.h"
#include "server/core/api/contribution.h"
#include "server/policy/placement.h"

namespace precondor {

inline constexpr int kDefaultWindowSteps = 2;

// Returns x + y for numbers that are not negative. Saturates at 2^62 instead of overflowing, as all sums here do.
int64_t AddBytes(int64_t x, int64_t y);

// Bytes that a session reserves.
struct Reservation {
  int at_once = 1;      // number of layers that run at once, at most
  int64_t states = 0;   // factors at their fullest
  int64_t scratch = 0;  // device and host buffers of the operations that may run at once
  int64_t staging = 0;  // contributions and results of the steps in the window
  int64_t total() const;
};

// Returns the bound for the given layers on a shard whose executor runs `parallelism` of them at once, or the bound
// with fewer at once, kFewestAtOnce or more, if only that is within `free` bytes.
// - Scratch: each layer's own if all run at once, otherwise the widest layer's for each that does. Deferred work is not
//   limited to fewer.
// - Staging per layer, for window_steps + 1 steps (a step that left the window may still be waiting for its update):
//   statistics of W workers in the session's statistics dtype, and kBytesPerContribution for each contribution.
// - Staging per layer, for window_steps steps: the gradients of the ranks that send them, which results reuse; and an
//   f64 accumulator if more than one rank sends; in SHARDED four gradients: the parts, the whole one, and twice for
//   parts of the answer.
// - Staging, once per layer and once per session: kernels/base/session_memory.h.
// - If workers have factors: in place of gradients, for window_steps steps the answers to pulls, which are merged
//   vectors in f32 in REPLAY and saved states in PULL_FACTORS; and two more saved states, one being saved and one being
//   fetched.
Reservation ComputeReservation(const SessionSpec& spec, const MethodSet& methods, absl::Span<const uint32_t> layers,
                               int window_steps, int parallelism, int64_t free = std::numeric_limits<int64_t>::max());
inline constexpr int kFewestAtOnce = 8;

// Return floats of scratch on the device: those in which one layer's statistics of a step are merged; those for its
// gradient and the answer.
int64_t StatisticsScratchElements(const SessionSpec& spec, uint32_t layer);
int64_t GradientScratchElements(const SessionSpec& spec, uint32_t layer);

// Returns the bytes of one layer's state and staging, for placement.
int64_t LayerBytes(const SessionSpec& spec, const Method& method, uint32_t layer, int window_steps);

// Returns the number of ranks that send a layer's gradient, or its pull: world_size, or 1 in DELEGATE.
int64_t GradientContributors(const SessionSpec& spec);
// Bytes that a shard keeps of one rank's contribution, besides its payload: the slot that tells what has arrived, and
// what describes the payload.
inline constexpr int64_t kBytesPerSlot = 16;
inline constexpr int64_t kBytesPerContribution = kBytesPerSlot + sizeof(StagedContribution);

// Returns cost and memory of every layer. The cost is the FLOPs of one step: update and preconditioning.
std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods);

}  // namespace precondor
