// SPDX-License-Identifier: Apache-2.0
// One step of one layer: its two phases, statistics and gradient, and how far each has come.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "server/core/contribution.h"
#include "server/core/gather.h"
#include "server/core/reduction.h"
#include "server/core/shard_control.h"
#include "server/core/shard_journal.h"

namespace precondor {

// An update that was made, for workers that have the factors too: in REPLAY the merged vectors it was made of.
struct SealedUpdate {
  std::vector<TensorDesc> tensors;  // a [k, d_in], g [k, d_out]
  std::shared_ptr<const Payload> bytes;
};

// OPEN takes contributions; SEALED has them all (or gave up on the rest) and waits for its turn on the layer's strand;
// APPLIED is in the factors or answered, and kept for repetitions; RETIRED takes part in nothing any more.
enum class PhaseState : uint8_t { kOpen, kSealed, kApplied, kRetired };
enum class PhaseEvent : uint8_t { kSeal, kApply, kRetire };

// The only way from one state to the next. An event that the state does not allow is a bug and aborts.
PhaseState NextState(PhaseState state, PhaseEvent event);

struct Phase {
  explicit Phase(Gather contributors) : gather(std::move(contributors)) {}
  Gather gather;
  PhaseState state = PhaseState::kOpen;
  bool skip = false;  // sealed without a usable quorum
  absl::Time opened_at = absl::InfiniteFuture();
  absl::Time sealed_at = absl::InfiniteFuture();

  // Nobody has contributed: nothing is lost when it goes.
  bool untouched() const { return state == PhaseState::kOpen && gather.empty(); }
  void Advance(PhaseEvent event) { state = NextState(state, event); }
};

// Who holds a session's oldest step up.
struct Laggards {
  uint64_t step = 0;
  std::set<uint32_t> ranks;  // empty: nobody
};

// Guarded by the layer's lock, but for the members from `restored_votes` on, which only the layer's strand touches.
struct StepSlot {
  StepSlot(uint64_t step, Mode mode, Gather statistics_contributors, Gather gradient_contributors)
      : step(step),
        mode(mode),
        statistics(std::move(statistics_contributors)),
        gradient(std::move(gradient_contributors)) {}

  // These processes took ranks over: what the earlier ones sent stands.
  void Inherit(absl::Span<const Member> members);
  // A rank that is to come to this step again.
  std::optional<uint32_t> owing() const;

  const uint64_t step;
  const Mode mode;  // of the first contribution; the others' has to be the same
  Phase statistics;
  Phase gradient;
  bool restored = false;  // from the journal, after the process that had it was lost
  // Statistics of it are lost with the memory that had them, and who sent them has gone on: no update is made of the
  // rest, which some would take in and some not.
  bool incomplete = false;
  std::vector<ResultFn> waiters;
  std::optional<GradientResult> result;             // once the gradient phase is APPLIED
  int64_t in_flight = 0;                            // what this slot adds to ShardContext::in_flight
  std::optional<std::vector<Vote>> restored_votes;  // that were about to be applied
  std::optional<Plan> plan;                         // that somebody may have been answered with
  std::optional<SealedUpdate> update;               // once it was made, where workers have factors
  std::optional<WeightedSum> sum;
  absl::Status lost;      // why the average cannot be made
  Payload result_buffer;  // the first gradient's bytes: the result has exactly their size
  float result_scale = 1.0f;
  std::shared_ptr<const DevicePayload> on_device;  // the only gradient, where it lies there
};

}  // namespace precondor
