// SPDX-License-Identifier: Apache-2.0
// A Collective over the memory of CUDA devices that uses NCCL. Each rank has one device; ranks are in one process or
// many, on one host or many.
//   The communicator is non-blocking, so that a lost peer costs the time-out and does not block the process: every call
//   polls NCCL and the stream until its deadline, and then ends the communicator with ncclCommAbort. NCCL neither says
//   which rank it waits for nor compares the ranks' calls. A rank notices a lost peer by its own time-out, unless its
//   owner calls Abort. docs/collective.md has what else NCCL guarantees.
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
  int device = 0;  // CUDA device index; no two ranks of a communicator may share a device
  // Operations start after the work that is already on this stream, which must outlive the collective. If it is null,
  // the collective makes a stream of its own, and an operation's inputs must be complete before the call.
  CUstream_st* stream = nullptr;
  // Joining fails with DeadlineExceeded within 0.1 s after *give_up becomes true. Null: joining never gives up early.
  const std::atomic<bool>* give_up = nullptr;
};

// Returns an id for one communicator. This process must live until all ranks have joined, and the ranks must be able to
// reach it by TCP, on the interface that NCCL chooses.
absl::StatusOr<std::string> NewNcclId();

// Joins the communicator and waits until all ranks have joined. Returns InvalidArgument if unique_id is malformed, the
// rank is not in [0, size), or the time-out is not positive and finite; Unavailable if the device does not exist;
// DeadlineExceeded if not all ranks join in time; and otherwise NCCL's own error. Destroy the collectives of all ranks
// at the same time, each on its own thread: the destructor waits for the other ranks, and gives up after 10 s.
absl::StatusOr<std::unique_ptr<Collective>> MakeNcclCollective(absl::string_view unique_id, int rank, int size,
                                                               const NcclOptions& options, absl::Duration timeout);

}  // namespace precondor
