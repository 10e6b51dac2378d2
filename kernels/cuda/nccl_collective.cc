// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/nccl_collective.h"

#include <atomic>
#include <cstring>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <poll.h>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/deadline.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"

namespace precondor {
namespace {

// Time-out for work after the last operation, when no caller waits for a result.
constexpr absl::Duration kCloseTimeout = absl::Seconds(10);

using cuda::ToStatus;

// Converts NCCL's result to a status. ncclInProgress counts as OK: callers for which it matters call Ready.
absl::Status ToStatus(absl::string_view what, ncclResult_t result, ncclComm_t comm) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": NCCL: ", ncclGetErrorString(result), ": ", ncclGetLastError(comm));
  switch (result) {
    case ncclRemoteError:  // a peer, or the network to it, has failed
    case ncclSystemError:
      return absl::UnavailableError(message);
    case ncclInvalidArgument:
      return absl::InvalidArgumentError(message);
    case ncclInvalidUsage:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF16:
      return ncclFloat16;
    case DType::kBF16:
      return ncclBfloat16;
  }
  return ncclNumTypes;  // NCCL refuses this value
}

// Polls until `ready` returns true. Polls eagerly at first, because most operations take microseconds; later it sleeps
// between polls, so that waiting for a late rank uses no processor. Returns DeadlineExceeded at the deadline.
absl::Status PollUntil(absl::string_view what, const Deadline& deadline,
                       absl::FunctionRef<absl::StatusOr<bool>()> ready) {
  constexpr int kEagerPolls = 1000;
  for (int polls = 0;; ++polls) {
    PRECONDOR_ASSIGN_OR_RETURN(const bool done, ready());
    if (done) return absl::OkStatus();
    if (deadline.passed()) {
      return absl::DeadlineExceededError(absl::StrCat(what, " timed out; NCCL does not say which rank it waits for"));
    }
    if (polls < kEagerPolls) {
      std::this_thread::yield();
    } else {
      poll(nullptr, 0, /*timeout=*/1);
    }
  }
}

class NcclCollective final : public Collective {
 public:
  NcclCollective(int rank, int size, const NcclOptions& options)
      : Collective(rank, size), options_(options), stream_(options.stream) {}
  ~NcclCollective() override;
  // Joins the communicator. Must be called once, before all other functions.
  absl::Status Open(const ncclUniqueId& id, absl::Duration timeout);
  absl::string_view name() const override { return "nccl"; }
  absl::string_view backend_name() const override { return "cuda"; }

 private:
  absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) override {
    return WithFault(RunGroup(group, timeout));
  }
  void DoFail(const absl::Status& why) override;
  void DoInterrupt() override { interrupted_ = true; }

  absl::Status RunGroup(absl::Span<const CollectiveCall> group, absl::Duration timeout);
  // Adds the device's fault to an internal error. NCCL reports a fault as a CUDA error without its name, so this
  // queries the device.
  absl::Status WithFault(absl::Status status) const;
  ncclResult_t Enqueue(const CollectiveCall& call);
  // Returns whether NCCL has finished its work in the background, or NCCL's error if the work failed.
  absl::StatusOr<bool> Ready(absl::string_view what) const;
  // Returns whether the stream has reached done_. Work of others may follow done_ on the stream, so the stream itself
  // may be busy.
  absl::StatusOr<bool> Passed(absl::string_view what) const;
  std::string Here(absl::string_view what) const { return absl::StrCat(what, ": rank ", rank(), " of ", size()); }

  const NcclOptions options_;
  cudaStream_t stream_;
  cudaEvent_t done_ = nullptr;
  float* barrier_ = nullptr;   // the element that Barrier sums
  ncclComm_t comm_ = nullptr;  // null before Open and after a failure
  bool open_ = false;
  uint64_t operations_ = 0;
  std::atomic<bool> interrupted_ = false;
};

absl::Status NcclCollective::Open(const ncclUniqueId& id, absl::Duration timeout) {
  const Deadline deadline(timeout, options_.give_up);
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("NCCL: no CUDA device: ", cudaGetErrorString(error)));
  }
  if (options_.device < 0 || options_.device >= devices) {
    return absl::UnavailableError(
        absl::StrCat("NCCL: expected a CUDA device from 0 to ", devices - 1, ", got ", options_.device));
  }
  PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's device", cudaSetDevice(options_.device)));
  if (stream_ == nullptr) {
    PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  }
  PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's event", cudaEventCreateWithFlags(&done_, cudaEventDisableTiming)));
  PRECONDOR_RETURN_IF_ERROR(
      ToStatus("NCCL's barrier", cudaMalloc(reinterpret_cast<void**>(&barrier_), sizeof(*barrier_))));
  PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's barrier", cudaMemsetAsync(barrier_, 0, sizeof(*barrier_), stream_)));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::string what = Here("joining");
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), comm_));
  PRECONDOR_RETURN_IF_ERROR(PollUntil(what, deadline, [&] { return Ready(what); }));
  open_ = true;
  return absl::OkStatus();
}

NcclCollective::~NcclCollective() {
  cudaSetDevice(options_.device);
  if (comm_ != nullptr) {
    // Finalize flushes and waits for the other ranks. Destroy does not block only after Finalize has succeeded.
    absl::Status closed = absl::AbortedError("never opened");
    if (open_) closed = ToStatus("closing", ncclCommFinalize(comm_), comm_);
    if (closed.ok()) closed = PollUntil("closing", Deadline(kCloseTimeout), [&] { return Ready("closing"); });
    closed.ok() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
  }
  if (barrier_ != nullptr) cudaFree(barrier_);
  if (done_ != nullptr) cudaEventDestroy(done_);
  if (stream_ != options_.stream) cudaStreamDestroy(stream_);
}

absl::Status NcclCollective::WithFault(absl::Status status) const {
  if (!absl::IsInternal(status)) return status;
  const cudaError_t error = cudaStreamQuery(stream_);
  (void)cudaGetLastError();
  if (!cuda::IsFatal(error)) return status;
  return absl::InternalError(
      absl::StrCat(std::string(status.message()), ": CUDA device ", options_.device, ": ", cudaGetErrorName(error)));
}

absl::Status NcclCollective::RunGroup(absl::Span<const CollectiveCall> group, absl::Duration timeout) {
  const Deadline deadline(timeout);
  const std::string what =
      Here(absl::StrCat(CollectiveGroupText(group.size(), group[0]), " (operation ", ++operations_, ")"));
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, cudaSetDevice(options_.device)));
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, ncclGroupStart(), comm_));
  absl::Status enqueued;
  for (const CollectiveCall& call : group) {
    if (enqueued.ok()) enqueued = ToStatus(what, Enqueue(call), comm_);
  }
  const absl::Status launched = ToStatus(what, ncclGroupEnd(), comm_);  // also after an error, to close the group
  PRECONDOR_RETURN_IF_ERROR(enqueued);
  PRECONDOR_RETURN_IF_ERROR(launched);
  // The work is on the stream only when NCCL is ready. Before that, no thread may query the stream.
  PRECONDOR_RETURN_IF_ERROR(PollUntil(what, deadline, [&] { return Ready(what); }));
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, cudaEventRecord(done_, stream_)));
  return PollUntil(what, deadline, [&]() -> absl::StatusOr<bool> {
    PRECONDOR_ASSIGN_OR_RETURN(const bool passed, Passed(what));
    if (passed) return true;
    PRECONDOR_RETURN_IF_ERROR(Ready(what).status());  // after an error the stream may never finish
    return false;
  });
}

ncclResult_t NcclCollective::Enqueue(const CollectiveCall& call) {
  if (call.kind != CollectiveKind::kBarrier && call.count == 0) return ncclSuccess;
  const ncclDataType_t type = NcclType(call.dtype);
  const auto count = static_cast<size_t>(call.count);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return ncclAllReduce(call.in, call.out, count, type, ncclSum, comm_, stream_);
    case CollectiveKind::kReduce:
      return ncclReduce(call.in, call.out, count, type, ncclSum, call.root, comm_, stream_);
    case CollectiveKind::kBroadcast:
      return ncclBroadcast(call.in, call.out, count, type, call.root, comm_, stream_);
    case CollectiveKind::kAllGather:
      return ncclAllGather(call.in, call.out, count, type, comm_, stream_);
    case CollectiveKind::kReduceScatter:
      return ncclReduceScatter(call.in, call.out, count, type, ncclSum, comm_, stream_);
    case CollectiveKind::kBarrier:
      return ncclAllReduce(barrier_, barrier_, 1, ncclFloat32, ncclSum, comm_, stream_);
  }
  return ncclInvalidArgument;
}

absl::StatusOr<bool> NcclCollective::Ready(absl::string_view what) const {
  if (interrupted_) return absl::AbortedError(absl::StrCat(what, ": interrupted"));
  ncclResult_t state = ncclSuccess;
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, ncclCommGetAsyncError(comm_, &state), comm_));
  PRECONDOR_RETURN_IF_ERROR(ToStatus(what, state, comm_));
  return state == ncclSuccess;
}

absl::StatusOr<bool> NcclCollective::Passed(absl::string_view what) const {
  const cudaError_t error = cudaEventQuery(done_);
  if (error != cudaErrorNotReady) {
    PRECONDOR_RETURN_IF_ERROR(ToStatus(what, error));
    return true;
  }
  cudaGetLastError();  // otherwise the next launch would report it
  return false;
}

// Runs on the only thread that is in NCCL, as ncclCommAbort requires. Returns when the work on the device has stopped,
// so that the caller can reuse its buffers.
void NcclCollective::DoFail(const absl::Status& why) {
  cudaSetDevice(options_.device);
  ncclCommAbort(comm_);
  comm_ = nullptr;
  // Nothing here can help a device that does not stop, and no status is better than `why`.
  if (cudaEventRecord(done_, stream_) != cudaSuccess) return;
  PollUntil("abort", Deadline(kCloseTimeout), [&] { return Passed("abort"); }).IgnoreError();
}

}  // namespace

absl::StatusOr<std::string> NewNcclId() {
  ncclUniqueId id;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("NCCL's unique id", ncclGetUniqueId(&id), nullptr));
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<Collective>> MakeNcclCollective(absl::string_view unique_id, int rank, int size,
                                                               const NcclOptions& options, absl::Duration timeout) {
  PRECONDOR_RETURN_IF_ERROR(CheckCommunicator(rank, size, timeout));
  ncclUniqueId id;
  if (unique_id.size() != sizeof(id.internal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("unique id: expected ", sizeof(id.internal), " bytes of NewNcclId, got ", unique_id.size()));
  }
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  auto collective = std::make_unique<NcclCollective>(rank, size, options);
  PRECONDOR_RETURN_IF_ERROR(collective->Open(id, timeout));
  return std::unique_ptr<Collective>(std::move(collective));
}

}  // namespace precondor
