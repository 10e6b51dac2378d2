// SPDX-License-Identifier: Apache-2.0
// The multi-device seam. The ranks 0 ... size - 1 of a communicator, each with its own device, sum and move elements
// together. Every rank holds one Collective, made from one unique id: bytes that a rank or a coordinating process
// creates and sends to all ranks (LocalRendezvous, NewNcclId). "Local" below is LocalCollective, "NCCL" is
// NcclCollective.
//
// Order:   all ranks make the same calls in the same order, with equal kinds, dtypes, counts and roots; time-outs and
//          buffers are each rank's own. Local detects ranks that differ (InvalidArgument, naming both calls). NCCL
//          cannot: such ranks end at the time-out or, if the byte counts fit, get wrong numbers.
// Memory:  buffers are contiguous, on the device of the backend that backend_name() names, and must live until the call
//          returns. `in` and `out` must not overlap, except as each operation allows. Counts are elements.
// Sums:    all ranks get equal bits. Local adds in rank order in f32 and rounds once at the end, so that the bits
//          depend on the inputs alone. NCCL guarantees no order, and may round 16-bit sums at each hop. f16 sums beyond
//          f16's range are infinite.
// Time:    a call returns when its results are in `out`, or within about its time-out, whatever the other ranks do.
// Errors:  InvalidArgument for this rank's own arguments: nothing was sent, and the other ranks wait. Any other failure
//          ends the communicator on every rank: DeadlineExceeded if a rank does not take part in time, Unavailable if a
//          rank is lost, Aborted if a rank called Abort, InvalidArgument if ranks differ, Internal for faults of the
//          device. The message names the operation and the rank; NCCL does not know the rank (docs/collective.md). From
//          then on every call returns that status at once. `out` is unspecified after a failure. With Local, a rank
//          that fails or leaves after an operation does not spoil that operation for ranks that are still in it.
// Threads: one operation at a time; a second one returns FailedPrecondition and changes nothing. Abort and status are
//          safe from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/dtype.h"
#include "kernels/base/mutex.h"

namespace precondor {

enum class CollectiveKind : uint8_t { kAllReduce = 1, kReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

// One operation of a group.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kF32;
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  int root = 0;
};

// Returns a text such as "AllReduce of 10 f32", "Broadcast of 3 bf16 from rank 1" or "Barrier".
std::string CollectiveCallText(const CollectiveCall& call);
// Returns the text of the only call, or "a group of 3 operations that begins with ...".
std::string CollectiveGroupText(uint64_t calls, const CollectiveCall& first);

// Checks the arguments that all implementations share. Returns InvalidArgument if the rank is not in [0, size), or if
// the time-out is not positive and finite.
absl::Status CheckCommunicator(int rank, int size, absl::Duration timeout);

class Collective {
 public:
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
  virtual absl::string_view name() const = 0;          // "local", "nccl"
  virtual absl::string_view backend_name() const = 0;  // "cpu", "cuda"
  int rank() const { return rank_; }
  int size() const { return size_; }

  // out [count] = sum over ranks of in [count]. in may be out.
  absl::Status AllReduce(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout);
  // out [count] of `root` = sum over ranks of in [count]. The other ranks' out is not used and may be null. in may be
  // out.
  absl::Status Reduce(DType dtype, const void* in, void* out, int64_t count, int root, absl::Duration timeout);
  // out [count] = in [count] of `root`; the others' in is not used and may be null. in may be out.
  absl::Status Broadcast(DType dtype, const void* in, void* out, int64_t count, int root, absl::Duration timeout);
  // out [size, count] = in [count] of rank after rank. in may be this rank's row of out.
  absl::Status AllGather(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout);
  // out [count] = this rank's row of the sum over ranks of in [size, count]. out may be this rank's row of in.
  absl::Status ReduceScatter(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout);
  // Returns when all ranks have called it.
  absl::Status Barrier(absl::Duration timeout);
  // Runs several operations at the cost of starting one. They run in any order: none may read or write what another one
  // writes. An empty group returns at once. An operation with count 0 moves nothing; it is unspecified whether it waits
  // for the other ranks.
  absl::Status Run(absl::Span<const CollectiveCall> group, absl::Duration timeout);

  // Ends the communicator with Aborted: on this rank at once, also inside an operation; on the other ranks in their
  // current or next operation (with NCCL at their time-out, or when they call Abort too). Later calls do nothing.
  void Abort(absl::string_view reason);
  // Returns OK, or the error that every further operation returns.
  absl::Status status() const;

 protected:
  Collective(int rank, int size) : rank_(rank), size_(size) {}

  // Runs a group that has been checked and is not empty. Never called twice at once. After DoInterrupt it returns soon,
  // with any status.
  virtual absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) = 0;
  // Tells the other ranks the reason and releases the communicator's resources. Called at most once, not during DoRun.
  virtual void DoFail(const absl::Status& why) = 0;
  // Makes a DoRun under way return soon. Called from any thread, possibly when no DoRun is under way.
  virtual void DoInterrupt() = 0;

 private:
  absl::Status Check(const CollectiveCall& call) const;
  absl::Status CheckOverlap(const CollectiveCall& call) const;

  const int rank_;
  const int size_;
  mutable Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a thread is in DoRun or DoFail
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
