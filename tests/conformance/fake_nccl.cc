// SPDX-License-Identifier: Apache-2.0
// What NcclCollective calls of NCCL and of the CUDA runtime, for machines without a GPU: four "devices" in host memory.
//   It shows how NcclCollective drives a non-blocking communicator, not how NCCL behaves. It is as reluctant as NCCL's
//   documentation allows (every step is ncclInProgress for a while, a lost peer is silence) and aborts the test at what
//   that documentation forbids: a call while another is in progress or on another thread, a look at the stream before
//   the work is on it, Destroy before Finalize has come off, anything after Abort.
#include "tests/conformance/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <nccl.h>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/mutex.h"

namespace precondor {
namespace {

constexpr int kDevices = 4;
constexpr int kReluctance = 3;  // polls for which a step stays in progress, whatever else it waits for

enum class Op { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter };
struct Posted {
  Op op;
  const char* in;
  char* out;
  size_t count;
  DType dtype;
  int root;
};
using Group = std::vector<Posted>;

// One communicator, as all its ranks see it.
struct Job {
  explicit Job(int size) : groups(size) {}
  int joined = 0;
  int finalized = 0;
  bool broken = false;                     // a rank has aborted: what is not done will never be
  std::vector<std::vector<Group>> groups;  // by rank, in order
  size_t done = 0;                         // groups that all ranks have posted, and that have been computed
};

Mutex mu;  // guards all there is, as well as the ranks' buffers
std::map<int, std::shared_ptr<Job>> jobs;
int next_id = 0;
std::atomic<int> live_communicators = 0;
std::atomic<ncclResult_t> async_error = ncclSuccess;
std::atomic<int64_t> allocations = 0;
std::atomic<bool> no_memory = false;
std::atomic<cudaError_t> stream_error = cudaSuccess;

DType TypeOf(ncclDataType_t type) {
  return type == ncclFloat32 ? DType::kF32 : type == ncclFloat16 ? DType::kF16 : DType::kBF16;
}

std::vector<float> Read(const Posted& posted, size_t first, size_t count) {
  std::vector<float> out(count);
  DecodeElements(posted.dtype, posted.in + first * ByteSize(posted.dtype), 1.0f, absl::MakeSpan(out));
  return out;
}

// The i-th operation of each rank's group.
void Compute(const std::vector<Posted>& ranks) {
  const size_t count = ranks[0].count, width = ByteSize(ranks[0].dtype), rows = ranks.size();
  if (ranks[0].op == Op::kBroadcast || ranks[0].op == Op::kAllGather) {
    std::string gathered;
    for (const Posted& rank : ranks) {
      const bool sends = ranks[0].op == Op::kAllGather || &rank == &ranks[ranks[0].root];
      if (sends) gathered.append(rank.in, count * width);
    }
    for (const Posted& rank : ranks) std::memcpy(rank.out, gathered.data(), gathered.size());
    return;
  }
  const size_t length = ranks[0].op == Op::kReduceScatter ? count * rows : count;
  std::vector<float> sum(length, 0.0f);
  for (const Posted& rank : ranks) {
    const std::vector<float> term = Read(rank, 0, length);
    for (size_t i = 0; i < length; ++i) sum[i] += term[i];
  }
  for (size_t rank = 0; rank < rows; ++rank) {
    if (ranks[0].op == Op::kReduce && static_cast<int>(rank) != ranks[0].root) continue;
    const size_t first = ranks[0].op == Op::kReduceScatter ? rank * count : 0;
    EncodeElements(ranks[0].dtype, absl::MakeConstSpan(sum).subspan(first, count), 1.0f, ranks[rank].out);
  }
}

void ComputeWhatAllHavePosted(Job& job) {
  const auto posted = [&](const std::vector<Group>& groups) { return groups.size() > job.done; };
  while (!job.broken && std::all_of(job.groups.begin(), job.groups.end(), posted)) {
    for (size_t i = 0; i < job.groups[0][job.done].size(); ++i) {
      std::vector<Posted> ranks;
      for (const std::vector<Group>& groups : job.groups) ranks.push_back(groups[job.done][i]);
      Compute(ranks);
    }
    ++job.done;
  }
}

}  // namespace

int FakeNcclCommunicators() { return live_communicators; }
void FakeNcclFailWith(ncclResult_t error) { async_error = error; }
int64_t FakeCudaAllocations() { return allocations; }
void FakeCudaFailStreams(cudaError_t error) { stream_error = error; }
void FakeCudaFailAllocations(bool fail) { no_memory = fail; }

}  // namespace precondor

// What the collective's stream is: it remembers whose work is on it.
struct CUstream_st {
  ncclComm* user = nullptr;
};
struct CUevent_st {
  cudaStream_t stream = nullptr;
  size_t launched = 0;  // when it was recorded
};

struct ncclComm {
  std::shared_ptr<precondor::Job> job;
  int rank = 0;
  int polls_left = precondor::kReluctance;  // of the step in progress
  enum class Step { kJoining, kIdle, kLaunching, kFinalizing, kFinalized } step = Step::kJoining;
  size_t launched = 0;  // groups
  precondor::Group group;
  cudaStream_t stream = nullptr;
  std::atomic<int> inside = 0;
};

namespace {

using precondor::jobs;
using precondor::mu;
using precondor::MutexLock;

// One call of one thread.
class Inside {
 public:
  explicit Inside(ncclComm_t comm) : comm_(comm) { PRECONDOR_CHECK(comm_->inside.fetch_add(1) == 0); }
  ~Inside() { comm_->inside.fetch_sub(1); }

 private:
  const ncclComm_t comm_;
};

thread_local ncclComm_t group_of = nullptr;
thread_local bool grouping = false;

ncclResult_t Post(ncclComm_t comm, cudaStream_t stream, precondor::Op op, const void* in, void* out, size_t count,
                  ncclDataType_t type, int root) {
  const Inside inside(comm);
  PRECONDOR_CHECK(grouping && comm->step == ncclComm::Step::kIdle && stream != nullptr && count > 0);
  group_of = comm;
  comm->stream = stream;
  comm->group.push_back(
      {op, static_cast<const char*>(in), static_cast<char*>(out), count, precondor::TypeOf(type), root});
  return ncclSuccess;
}

void Delete(ncclComm_t comm) {
  if (comm->stream != nullptr) comm->stream->user = nullptr;
  delete comm;
  precondor::live_communicators.fetch_sub(1);
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) { return result == ncclRemoteError ? "remote error" : "error"; }
const char* ncclGetLastError(ncclComm_t comm) { return "as the test wants it"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const MutexLock lock(mu);
  std::memset(id->internal, 0, sizeof(id->internal));
  const int number = precondor::next_id++;
  std::memcpy(id->internal, &number, sizeof(number));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  PRECONDOR_CHECK(config->blocking == 0);
  const MutexLock lock(mu);
  int number = 0;
  std::memcpy(&number, id.internal, sizeof(number));
  std::shared_ptr<precondor::Job>& job = jobs[number];
  if (job == nullptr) job = std::make_shared<precondor::Job>(size);
  ++job->joined;
  *comm = new ncclComm;
  (*comm)->job = job;
  (*comm)->rank = rank;
  precondor::live_communicators.fetch_add(1);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Inside inside(comm);
  const MutexLock lock(mu);
  *state = precondor::async_error;
  if (*state != ncclSuccess) return ncclSuccess;
  *state = ncclInProgress;
  if (comm->polls_left > 0 && comm->polls_left-- > 0) return ncclSuccess;
  const int size = static_cast<int>(comm->job->groups.size());
  switch (comm->step) {
    case ncclComm::Step::kJoining:
      if (comm->job->joined < size) return ncclSuccess;
      comm->step = ncclComm::Step::kIdle;
      break;
    case ncclComm::Step::kLaunching:
      comm->job->groups[comm->rank].push_back(std::move(comm->group));
      comm->group.clear();
      comm->launched = comm->job->groups[comm->rank].size();
      if (comm->stream != nullptr) comm->stream->user = comm;
      precondor::ComputeWhatAllHavePosted(*comm->job);
      comm->step = ncclComm::Step::kIdle;
      break;
    case ncclComm::Step::kFinalizing:
      if (comm->job->finalized < size) return ncclSuccess;
      comm->step = ncclComm::Step::kFinalized;
      break;
    case ncclComm::Step::kIdle:
    case ncclComm::Step::kFinalized:
      break;
  }
  *state = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  PRECONDOR_CHECK(!grouping);
  grouping = true;
  group_of = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  PRECONDOR_CHECK(grouping);
  grouping = false;
  if (group_of == nullptr) return ncclSuccess;
  const Inside inside(group_of);
  group_of->step = ncclComm::Step::kLaunching;
  group_of->polls_left = precondor::kReluctance;
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  PRECONDOR_CHECK(op == ncclSum);
  return Post(comm, stream, precondor::Op::kAllReduce, in, out, count, type, 0);
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  PRECONDOR_CHECK(op == ncclSum);
  return Post(comm, stream, precondor::Op::kReduce, in, out, count, type, root);
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return Post(comm, stream, precondor::Op::kBroadcast, in, out, count, type, root);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return Post(comm, stream, precondor::Op::kAllGather, in, out, count, type, 0);
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  PRECONDOR_CHECK(op == ncclSum);
  return Post(comm, stream, precondor::Op::kReduceScatter, in, out, count, type, 0);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Inside inside(comm);
  PRECONDOR_CHECK(comm->step == ncclComm::Step::kIdle);
  const MutexLock lock(mu);
  ++comm->job->finalized;
  comm->step = ncclComm::Step::kFinalizing;
  comm->polls_left = precondor::kReluctance;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  PRECONDOR_CHECK(comm->step == ncclComm::Step::kFinalized && comm->inside == 0);
  const MutexLock lock(mu);
  Delete(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  PRECONDOR_CHECK(comm->inside == 0 && !grouping);
  const MutexLock lock(mu);
  comm->job->broken = true;
  Delete(comm);
  return ncclSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) { return "an error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = precondor::kDevices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device >= 0 && device < precondor::kDevices ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (precondor::no_memory) return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  ++precondor::allocations;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  --precondor::allocations;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const MutexLock lock(mu);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return precondor::stream_error; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const MutexLock lock(mu);
  event->stream = stream;
  if (stream->user == nullptr) return cudaSuccess;
  PRECONDOR_CHECK(stream->user->step == ncclComm::Step::kIdle);
  event->launched = stream->user->launched;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const MutexLock lock(mu);
  const ncclComm_t user = event->stream->user;
  return user == nullptr || event->launched <= user->job->done ? cudaSuccess : cudaErrorNotReady;
}

}  // extern "C"
