// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/host_nccl_collective.h"

#include <cuda_runtime_api.h>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/deadline.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"

namespace precondor {
namespace {

using cuda::ToStatus;

class HostNcclCollective final : public Collective {
 public:
  HostNcclCollective(std::unique_ptr<Collective> ranks, int device)
      : Collective(ranks->rank(), ranks->size()), ranks_(std::move(ranks)), device_(device) {}
  ~HostNcclCollective() override {
    ranks_.reset();  // first, because it may still use the memory
    cudaSetDevice(device_);
    if (memory_ != nullptr) cudaFree(memory_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  absl::Status Open() {
    PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's device", cudaSetDevice(device_)));
    return ToStatus("NCCL's copies", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  absl::string_view name() const override { return ranks_->name(); }
  absl::string_view backend_name() const override { return "cpu"; }

 private:
  // Offsets in bytes of a call's operands in the device memory. 0 bytes: this rank has no such operand.
  struct PackedRange {
    int64_t in = 0, in_bytes = 0;
    int64_t out = 0, out_bytes = 0;
  };

  absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) override {
    const Deadline deadline(timeout);
    const std::string what = CollectiveGroupText(group.size(), group[0]);
    int64_t bytes = 0;
    std::vector<PackedRange> places;
    for (const CollectiveCall& call : group) places.push_back(PackedRangeOf(call, bytes));
    PRECONDOR_RETURN_IF_ERROR(ToStatus(what, cudaSetDevice(device_)));
    PRECONDOR_RETURN_IF_ERROR(Reserve(what, bytes));
    std::vector<CollectiveCall> calls(group.begin(), group.end());
    for (size_t i = 0; i < calls.size(); ++i) {
      const PackedRange& place = places[i];
      calls[i].in = place.in_bytes == 0 ? nullptr : memory_ + place.in;
      calls[i].out = place.out_bytes == 0 ? nullptr : memory_ + place.out;
      if (place.in_bytes == 0) continue;
      PRECONDOR_RETURN_IF_ERROR(ToStatus(
          what, cudaMemcpyAsync(memory_ + place.in, group[i].in, place.in_bytes, cudaMemcpyHostToDevice, stream_)));
    }
    PRECONDOR_RETURN_IF_ERROR(ToStatus(what, cudaStreamSynchronize(stream_)));
    const absl::Duration left = deadline.left();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(what, ": copying to the device took its whole time-out"));
    }
    PRECONDOR_RETURN_IF_ERROR(ranks_->Run(calls, left));
    for (size_t i = 0; i < calls.size(); ++i) {
      if (places[i].out_bytes == 0) continue;
      PRECONDOR_RETURN_IF_ERROR(ToStatus(
          what, cudaMemcpyAsync(group[i].out, calls[i].out, places[i].out_bytes, cudaMemcpyDeviceToHost, stream_)));
    }
    return ToStatus(what, cudaStreamSynchronize(stream_));
  }
  void DoFail(const absl::Status& why) override { ranks_->Abort(why.message()); }
  void DoInterrupt() override { ranks_->Abort("the operation was interrupted"); }

  // Returns the place of the operands of `call` from `end` on, and advances `end`.
  PackedRange PackedRangeOf(const CollectiveCall& call, int64_t& end) const {
    if (call.kind == CollectiveKind::kBarrier) return {};
    constexpr int64_t kAlignment = 256;
    const auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return begin;
    };
    const int64_t row = call.count * ByteSize(call.dtype);
    PackedRange place;
    if (call.kind != CollectiveKind::kBroadcast || call.root == rank()) {
      place.in_bytes = row * (call.kind == CollectiveKind::kReduceScatter ? size() : 1);
    }
    if (call.kind != CollectiveKind::kReduce || call.root == rank()) {
      place.out_bytes = row * (call.kind == CollectiveKind::kAllGather ? size() : 1);
    }
    place.in = take(place.in_bytes);
    place.out = take(place.out_bytes);
    return place;
  }

  absl::Status Reserve(absl::string_view what, int64_t bytes) {
    if (bytes <= reserved_bytes_) return absl::OkStatus();
    if (memory_ != nullptr) cudaFree(memory_);
    memory_ = nullptr;
    reserved_bytes_ = 0;
    void* memory = nullptr;
    PRECONDOR_RETURN_IF_ERROR(ToStatus(absl::StrCat(what, ": ", bytes, " bytes on the device"),
                                       cudaMalloc(&memory, static_cast<size_t>(bytes))));
    memory_ = static_cast<char*>(memory);
    reserved_bytes_ = bytes;
    return absl::OkStatus();
  }

  std::unique_ptr<Collective> ranks_;
  const int device_;
  cudaStream_t stream_ = nullptr;
  char* memory_ = nullptr;
  int64_t reserved_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeHostNcclCollective(absl::string_view unique_id, int rank, int size,
                                                                   const NcclOptions& options, absl::Duration timeout) {
  if (options.stream != nullptr) {
    return absl::InvalidArgumentError("collective of host memory: expected no stream, got one");
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Collective> ranks,
                             MakeNcclCollective(unique_id, rank, size, options, timeout));
  auto collective = std::make_unique<HostNcclCollective>(std::move(ranks), options.device);
  PRECONDOR_RETURN_IF_ERROR(collective->Open());
  return std::unique_ptr<Collective>(std::move(collective));
}

}  // namespace precondor
