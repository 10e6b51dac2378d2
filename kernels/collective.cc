// SPDX-License-Identifier: Apache-2.0
#include "kernels/collective.h"

#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::string_view KindName(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "AllReduce";
    case CollectiveKind::kReduce:
      return "Reduce";
    case CollectiveKind::kBroadcast:
      return "Broadcast";
    case CollectiveKind::kAllGather:
      return "AllGather";
    case CollectiveKind::kReduceScatter:
      return "ReduceScatter";
    case CollectiveKind::kBarrier:
      return "Barrier";
  }
  return "unknown operation";
}

absl::Status CheckTimeout(absl::Duration timeout) {
  if (timeout > absl::ZeroDuration() && timeout < absl::InfiniteDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("time-out: expected a positive, finite duration, got ", absl::FormatDuration(timeout)));
}

bool HasRoot(CollectiveKind kind) { return kind == CollectiveKind::kReduce || kind == CollectiveKind::kBroadcast; }

}  // namespace

std::string CollectiveCallText(const CollectiveCall& call) {
  if (call.kind == CollectiveKind::kBarrier) return std::string(KindName(call.kind));
  std::string text = absl::StrCat(KindName(call.kind), " of ", call.count, " ", DTypeName(call.dtype));
  if (HasRoot(call.kind)) {
    absl::StrAppend(&text, call.kind == CollectiveKind::kReduce ? " to rank " : " from rank ", call.root);
  }
  return text;
}

std::string CollectiveGroupText(uint64_t calls, const CollectiveCall& first) {
  if (calls == 1) return CollectiveCallText(first);
  return absl::StrCat("a group of ", calls, " operations that begins with ", CollectiveCallText(first));
}

absl::Status CheckCommunicator(int rank, int size, absl::Duration timeout) {
  if (rank >= 0 && rank < size) return CheckTimeout(timeout);
  return absl::InvalidArgumentError(
      absl::StrCat("communicator: expected a rank from 0 to size - 1, got rank ", rank, " of size ", size));
}

absl::Status Collective::AllReduce(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout) {
  return Run({{CollectiveKind::kAllReduce, dtype, in, out, count}}, timeout);
}

absl::Status Collective::Reduce(DType dtype, const void* in, void* out, int64_t count, int root,
                                absl::Duration timeout) {
  return Run({{CollectiveKind::kReduce, dtype, in, out, count, root}}, timeout);
}

absl::Status Collective::Broadcast(DType dtype, const void* in, void* out, int64_t count, int root,
                                   absl::Duration timeout) {
  return Run({{CollectiveKind::kBroadcast, dtype, in, out, count, root}}, timeout);
}

absl::Status Collective::AllGather(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout) {
  return Run({{CollectiveKind::kAllGather, dtype, in, out, count}}, timeout);
}

absl::Status Collective::ReduceScatter(DType dtype, const void* in, void* out, int64_t count, absl::Duration timeout) {
  return Run({{CollectiveKind::kReduceScatter, dtype, in, out, count}}, timeout);
}

absl::Status Collective::Barrier(absl::Duration timeout) { return Run({CollectiveCall{}}, timeout); }

absl::Status Collective::Run(absl::Span<const CollectiveCall> group, absl::Duration timeout) {
  PRECONDOR_RETURN_IF_ERROR(CheckTimeout(timeout));
  for (const CollectiveCall& call : group) PRECONDOR_RETURN_IF_ERROR(Check(call));
  {
    MutexLock lock(mu_);
    if (!status_.ok() || group.empty()) return status_;
    if (busy_) {
      return absl::FailedPreconditionError(absl::StrCat(CollectiveGroupText(group.size(), group[0]),
                                                        ": another thread is in an operation of this communicator"));
    }
    busy_ = true;
  }
  absl::Status status = DoRun(group, timeout);
  {
    MutexLock lock(mu_);
    if (!status_.ok()) {
      status = status_;  // a concurrent Abort set it and left DoFail to this thread
    } else {
      status_ = status;
    }
    if (status.ok()) {
      busy_ = false;
      return status;
    }
  }
  DoFail(status);
  MutexLock lock(mu_);
  busy_ = false;
  return status;
}

void Collective::Abort(absl::string_view reason) {
  const absl::Status why = absl::AbortedError(absl::StrCat("rank ", rank_, " aborted: ", reason));
  bool in_operation;
  {
    MutexLock lock(mu_);
    if (!status_.ok()) return;
    status_ = why;
    in_operation = busy_;
    busy_ = true;
  }
  if (in_operation) return DoInterrupt();
  DoFail(why);
  MutexLock lock(mu_);
  busy_ = false;
}

absl::Status Collective::status() const {
  MutexLock lock(mu_);
  return status_;
}

absl::Status Collective::Check(const CollectiveCall& call) const {
  const auto invalid = [&](absl::string_view expected) {
    return absl::InvalidArgumentError(absl::StrCat(CollectiveCallText(call), ": expected ", expected));
  };
  if (call.kind == CollectiveKind::kBarrier) return absl::OkStatus();
  const int64_t largest = std::numeric_limits<int64_t>::max() / size_ / static_cast<int64_t>(sizeof(float));
  if (call.count < 0 || call.count > largest) return invalid(absl::StrCat("a count from 0 to ", largest));
  if (HasRoot(call.kind) && (call.root < 0 || call.root >= size_)) {
    return invalid(absl::StrCat("a root from 0 to ", size_ - 1));
  }
  if (call.count == 0) return absl::OkStatus();
  const bool reads = call.kind != CollectiveKind::kBroadcast || call.root == rank_;
  const bool writes = call.kind != CollectiveKind::kReduce || call.root == rank_;
  if (reads && call.in == nullptr) return invalid("a buffer to read from, got null");
  if (writes && call.out == nullptr) return invalid("a buffer to write to, got null");
  return reads && writes ? CheckOverlap(call) : absl::OkStatus();
}

absl::Status Collective::CheckOverlap(const CollectiveCall& call) const {
  const uint64_t block = static_cast<uint64_t>(call.count) * ByteSize(call.dtype);
  const uint64_t in_bytes = block * (call.kind == CollectiveKind::kReduceScatter ? size_ : 1);
  const uint64_t out_bytes = block * (call.kind == CollectiveKind::kAllGather ? size_ : 1);
  const auto in = reinterpret_cast<uintptr_t>(call.in), out = reinterpret_cast<uintptr_t>(call.out);
  if (in + in_bytes <= out || out + out_bytes <= in) return absl::OkStatus();
  // In place means that this rank's block of the smaller buffer is its own row of the larger buffer.
  const uint64_t row = block * static_cast<uint64_t>(rank_);
  const uint64_t in_row = call.kind == CollectiveKind::kReduceScatter ? row : 0;
  const uint64_t out_row = call.kind == CollectiveKind::kAllGather ? row : 0;
  if (in + in_row == out + out_row) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected in and out apart or in place, got %d bytes at %p and %d at %p",
                      CollectiveCallText(call), in_bytes, call.in, out_bytes, call.out));
}

}  // namespace precondor
