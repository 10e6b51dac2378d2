// SPDX-License-Identifier: Apache-2.0
// How a session's ranks and a shard come to a communicator: what differs between kinds of Collective.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"

namespace precondor {

// Both functions may be called from any thread. Collectives are of host memory.
struct PlaneTransport {
  std::string name;  // as JoinPlaneResponse calls it
  struct Rendezvous {
    std::string unique_id;
    std::shared_ptr<void> place;  // to be kept until all have come
  };
  // A new communicator's.
  std::function<absl::StatusOr<Rendezvous>()> open;
  // Waits for all ranks, but no longer than `timeout`, or until `*give_up`.
  std::function<absl::StatusOr<std::unique_ptr<Collective>>(absl::string_view unique_id, int rank, int size,
                                                            absl::Duration timeout, const std::atomic<bool>* give_up)>
      join;
};

}  // namespace precondor
