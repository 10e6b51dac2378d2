// SPDX-License-Identifier: Apache-2.0
// A Collective over host memory, for threads of one process and for processes of one host, by TCP on 127.0.0.1.
//   Every operation starts with all ranks telling all others what they call. Data goes straight from rank to rank: a
//   rank sums one part of each AllReduce, Reduce and ReduceScatter, in pieces, so that no rank sees everything and
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

// Waits until all ranks have come to the LocalRendezvous of `unique_id`. size <= kMaxLocalRanks. Errors:
// InvalidArgument for an id that is none, a rank outside of size, ranks that disagree on the size or come twice;
// DeadlineExceeded or Unavailable naming the ranks that did not come or left; FailedPrecondition when all have come
// before. Once `*give_up` is true the time-out has passed.
absl::StatusOr<std::unique_ptr<Collective>> MakeLocalCollective(absl::string_view unique_id, int rank, int size,
                                                                absl::Duration timeout,
                                                                const std::atomic<bool>* give_up = nullptr);

}  // namespace precondor
