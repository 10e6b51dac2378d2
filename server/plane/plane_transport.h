// SPDX-License-Identifier: Apache-2.0
// How a session's ranks and a shard form a communicator: the part that differs between kinds of Collective.
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

// One kind of communicator. The Collectives work on host memory. Thread-safe.
struct PlaneTransport {
  std::string name;  // value of JoinPlaneResponse.transport
  struct Rendezvous {
    std::string unique_id;
    std::shared_ptr<void> place;  // must be kept until all ranks have joined; may be null
  };
  // Opens the rendezvous of a new communicator.
  std::function<absl::StatusOr<Rendezvous>()> open;
  // Joins the communicator as `rank` of `size` ranks. Waits for all ranks until `timeout` has passed or `*give_up` is
  // true.
  std::function<absl::StatusOr<std::unique_ptr<Collective>>(absl::string_view unique_id, int rank, int size,
                                                            absl::Duration timeout, const std::atomic<bool>* give_up)>
      join;
};

}  // namespace precondor
