// SPDX-License-Identifier: Apache-2.0
// A Collective over the memory of CUDA devices, by NCCL: one rank a device, in one process or many, on one host or
// many.
//   The communicator is non-blocking, so that a lost peer costs the time-out and not the process: every call polls NCCL
//   and the stream until its deadline, and then ends the communicator by ncclCommAbort. NCCL does not say which rank it
//   waits for, nor compare what ranks call; each rank finds out by its own time-out, or when its owner tells it to
//   Abort. docs/collective.md has what NCCL promises beyond that.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/collective.h"

struct CUstream_st;  // cudaStream_t points to it

namespace precondor {

struct NcclOptions {
  int device = 0;  // no two ranks of a communicator may share one
  // Operations start after what has been launched on it. It must outlive the collective. Null: one of its own, and then
  // what operations read must have been written before the call.
  CUstream_st* stream = nullptr;
  // Joining ends as if its time-out had passed once *give_up is true, within a tenth of a second. Null: never.
  const std::atomic<bool>* give_up = nullptr;
};

// An id for one communicator. Its first communicator's ranks must reach this process and host by TCP, as NCCL sees fit.
absl::StatusOr<std::string> NewNcclId();

// Waits until all ranks have called it. Errors: InvalidArgument for an id that is none or a rank outside of size;
// Unavailable without such a device; DeadlineExceeded when not all ranks came; NCCL's own. End all ranks' collectives
// at the same time, each on its own thread: the last step waits for the others, and gives up after 10 seconds.
absl::StatusOr<std::unique_ptr<Collective>> MakeNcclCollective(absl::string_view unique_id, int rank, int size,
                                                               const NcclOptions& options, absl::Duration timeout);

}  // namespace precondor
