// SPDX-License-Identifier: Apache-2.0
// The multi-device seam. The ranks 0 ... size - 1 of a communicator, each with a device of its own, sum and move
// elements together. Every rank holds one Collective, made from the same unique id: bytes that one of them, or their
// coordinator, made and sent to all (LocalRendezvous, NewNcclId).
//
// Order:   all ranks make the same calls in the same order: kinds, dtypes, counts and roots are the same, time-outs and
//          buffers each rank's own. Local finds ranks that differ (InvalidArgument, naming both calls); NCCL cannot:
//          there they end at the time-out or, where the byte counts fit, in wrong numbers.
// Memory:  buffers are contiguous, on the device of the backend that backend_name() names, and stay until the call
//          returns. `in` and `out` do not overlap, but for the places that each operation names. Counts are elements.
// Sums:    all ranks get the same bits. Local adds in rank order in f32 and rounds once at the end, so that the bits
//          depend on nothing but the inputs. NCCL promises no order, and may round 16-bit sums at each hop. f16 sums
//          beyond its range are infinite.
// Time:    a call returns when its results are in `out`. It ends within about its time-out, whatever the others do.
// Errors:  InvalidArgument for this rank's own arguments: nothing was sent, and the others wait. Any other failure ends
//          the communicator on every rank: DeadlineExceeded for a rank that does not come, Unavailable for one that is
//          lost, Aborted for one that called Abort, InvalidArgument for ranks that differ, Internal for the device's
//          faults. The message names the operation and the rank, which NCCL does not know (docs/collective.md). From
//          then on every call returns that status at once. `out` is unspecified after a failure. Under Local, a rank
//          that fails or leaves after an operation does not spoil that operation for those who are still in it.
// Threads: one operation at a time (FailedPrecondition for a second, which changes nothing); Abort and status from any.
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

// One operation, for a group.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kF32;
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  int root = 0;
};

// "AllReduce of 10 f32", "Broadcast of 3 bf16 from rank 1", "Barrier".
std::string CollectiveCallText(const CollectiveCall& call);
// That of the one call, or "a group of 3 operations that begins with ...".
std::string CollectiveGroupText(uint64_t calls, const CollectiveCall& first);

// What all implementations ask of those who make one: InvalidArgument where the rank is not one of `size`, or the
// time-out is not positive and finite.
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
  // The same on `root` alone; the others' out is not used and may be null.
  absl::Status Reduce(DType dtype, const void* in, void* out, int64_t count, int root, absl::Duration timeout);
  // out [count] = in [count] of `root`; the others' in is not used and may be null. in may be out.
  absl::Status Broadcast(DType dtype, const void* in, void* out, int64_t count, int root, absl::Duration timeout);
  // out [size, count] = in [count] of rank after rank. in may be this rank's row of out.
  absl::Status AllGather(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout);
  // out [count] = this rank's row of the sum over ranks of in [size, count]. out may be this rank's row of in.
  absl::Status ReduceScatter(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout);
  // Returns once all ranks have come.
  absl::Status Barrier(absl::Duration timeout);
  // Several operations at the cost of one start. They run in any order: none may read or write what another writes.
  // An empty group returns at once. A count of 0 moves nothing; whether it waits for the others is not said.
  absl::Status Run(absl::Span<const CollectiveCall> group, absl::Duration timeout);

  // Ends the communicator with Aborted, on this rank at once, also inside an operation; the other ranks hear of it in
  // their current or next one (under NCCL by their time-out, or when they call Abort too). Later calls do nothing.
  void Abort(absl::string_view reason);
  // OK, or why every further operation fails.
  absl::Status status() const;

 protected:
  Collective(int rank, int size) : rank_(rank), size_(size) {}

  // Runs a checked group that is not empty; never two at once. After DoInterrupt it returns soon, with any status.
  virtual absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) = 0;
  // Called once at most, not during DoRun: tell the others why, give up what the communicator holds.
  virtual void DoFail(const absl::Status& why) = 0;
  // From any thread, possibly when no DoRun is under way.
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
