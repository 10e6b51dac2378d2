// SPDX-License-Identifier: Apache-2.0
// A Collective over host memory, for threads of one process and for processes of one host, by TCP on 127.0.0.1.
//   Every operation starts with all ranks sending their call to all others. Data travels directly between ranks. Each
//   rank sums one part of each AllReduce, Reduce and ReduceScatter, in pieces, so that no rank receives everything and
//   scratch stays small (size x 128 KiB and a little).
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"
#include "kernels/cpu/local_rendezvous.h"

namespace precondor {

// Joins a communicator; returns when all ranks have joined the LocalRendezvous of `unique_id`. Precondition: size <=
// kMaxLocalRanks. Returns InvalidArgument for an invalid id, a rank outside of size, and ranks that disagree on the
// size or join twice; DeadlineExceeded or Unavailable, with the ranks that did not join or left; FailedPrecondition if
// all ranks have joined before. If `*give_up` becomes true, the call ends as at its time-out.
absl::StatusOr<std::unique_ptr<Collective>> MakeLocalCollective(absl::string_view unique_id, int rank, int size,
                                                                absl::Duration timeout,
                                                                const std::atomic<bool>* give_up = nullptr);

}  // namespace precondor
