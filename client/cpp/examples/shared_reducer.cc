// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/shared_reducer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::digits {

// At the start of the mapping; the weights and the ranks' slots follow. `mu` guards the two counters.
struct SharedReducer::Region {
  pthread_mutex_t mu;
  pthread_cond_t all_here;
  int32_t arrived;
  uint64_t generation;
};

namespace {

constexpr size_t kAlignment = 64;
size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

absl::Status SystemError(absl::string_view call) {
  return absl::InternalError(absl::StrCat("shared reducer: ", call, ": ", std::strerror(errno)));
}

}  // namespace

static size_t WeightsOffset(size_t region_bytes) { return RoundUp(region_bytes); }

static size_t SlotsOffset(size_t region_bytes, const SharedReducer::Shape& shape) {
  return WeightsOffset(region_bytes) + RoundUp(sizeof(double) * static_cast<size_t>(shape.ranks));
}

static size_t SlotBytes(const SharedReducer::Shape& shape) {
  return RoundUp(sizeof(float) * static_cast<size_t>(shape.max_elements));
}

absl::StatusOr<std::unique_ptr<SharedReducer>> SharedReducer::Attach(int fd, Shape shape, absl::Duration timeout) {
  const size_t bytes = SlotsOffset(sizeof(Region), shape) + SlotBytes(shape) * static_cast<size_t>(shape.ranks);
  struct stat info = {};
  if (fstat(fd, &info) != 0) return SystemError("fstat");
  if (static_cast<size_t>(info.st_size) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared reducer: expected a region of ", bytes, " bytes, got ", info.st_size));
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return SystemError("mmap");
  return std::unique_ptr<SharedReducer>(new SharedReducer(fd, static_cast<Region*>(memory), shape, timeout));
}

absl::StatusOr<std::unique_ptr<SharedReducer>> SharedReducer::Create(Shape shape, absl::Duration timeout) {
  const int fd = memfd_create("precondor-digits", MFD_CLOEXEC);
  if (fd < 0) return SystemError("memfd_create");
  const size_t bytes = SlotsOffset(sizeof(Region), shape) + SlotBytes(shape) * static_cast<size_t>(shape.ranks);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const absl::Status status = SystemError("ftruncate");
    close(fd);
    return status;
  }
  absl::StatusOr<std::unique_ptr<SharedReducer>> reducer = Attach(fd, shape, timeout);
  if (!reducer.ok()) {
    close(fd);
    return reducer;
  }
  Region& region = *(*reducer)->region_;  // zeroed by ftruncate
  pthread_mutexattr_t mutex_attributes;
  pthread_mutexattr_init(&mutex_attributes);
  pthread_mutexattr_setpshared(&mutex_attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&region.mu, &mutex_attributes);
  pthread_mutexattr_destroy(&mutex_attributes);
  pthread_condattr_t condition_attributes;
  pthread_condattr_init(&condition_attributes);
  pthread_condattr_setpshared(&condition_attributes, PTHREAD_PROCESS_SHARED);
  pthread_condattr_setclock(&condition_attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&region.all_here, &condition_attributes);
  pthread_condattr_destroy(&condition_attributes);
  return reducer;
}

SharedReducer::SharedReducer(int fd, Region* region, Shape shape, absl::Duration timeout)
    : fd_(fd), region_(region), shape_(shape), timeout_(timeout) {}

SharedReducer::~SharedReducer() {
  munmap(region_, SlotsOffset(sizeof(Region), shape_) + SlotBytes(shape_) * static_cast<size_t>(shape_.ranks));
  close(fd_);
}

double* SharedReducer::Weights() const {
  return reinterpret_cast<double*>(reinterpret_cast<char*>(region_) + WeightsOffset(sizeof(Region)));
}

float* SharedReducer::Slot(int32_t rank) const {
  char* const slots = reinterpret_cast<char*>(region_) + SlotsOffset(sizeof(Region), shape_);
  return reinterpret_cast<float*>(slots + SlotBytes(shape_) * static_cast<size_t>(rank));
}

absl::Status SharedReducer::CheckFits(MatrixView matrix) const {
  if (matrix.contiguous() && matrix.size() <= shape_.max_elements) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("shared reducer: expected a contiguous matrix of at most ",
                                                 shape_.max_elements, " elements, got [", matrix.rows, ", ",
                                                 matrix.cols, "] with stride ", matrix.stride));
}

absl::Status SharedReducer::Barrier() {
  timespec deadline = {};
  clock_gettime(CLOCK_MONOTONIC, &deadline);
  deadline.tv_sec += absl::ToInt64Seconds(timeout_) + 1;
  pthread_mutex_lock(&region_->mu);
  const uint64_t generation = region_->generation;
  int error = 0;
  if (++region_->arrived == shape_.ranks) {
    region_->arrived = 0;
    ++region_->generation;
    pthread_cond_broadcast(&region_->all_here);
  } else {
    while (region_->generation == generation && error != ETIMEDOUT) {
      error = pthread_cond_timedwait(&region_->all_here, &region_->mu, &deadline);
    }
  }
  const int32_t arrived = region_->arrived;
  const bool complete = region_->generation != generation;
  pthread_mutex_unlock(&region_->mu);
  if (complete) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("shared reducer: ", arrived, " of ", shape_.ranks,
                                                  " ranks arrived within ", absl::FormatDuration(timeout_)));
}

absl::Status SharedReducer::WeightedMean(int32_t rank, double weight, MatrixView matrix) {
  PRECONDOR_RETURN_IF_ERROR(CheckFits(matrix));
  std::copy(matrix.data, matrix.data + matrix.size(), Slot(rank));
  Weights()[rank] = weight;
  PRECONDOR_RETURN_IF_ERROR(Barrier());
  double total = 0;
  for (int32_t r = 0; r < shape_.ranks; ++r) total += Weights()[r];
  for (int64_t i = 0; i < matrix.size(); ++i) {
    double sum = 0;
    for (int32_t r = 0; r < shape_.ranks; ++r) sum += Weights()[r] * static_cast<double>(Slot(r)[i]);
    matrix.data[i] = static_cast<float>(sum / total);
  }
  return Barrier();  // no rank fills its slot again before all have read it
}

absl::Status SharedReducer::Broadcast(int32_t rank, int32_t root, MatrixView matrix) {
  PRECONDOR_RETURN_IF_ERROR(CheckFits(matrix));
  if (rank == root) std::copy(matrix.data, matrix.data + matrix.size(), Slot(root));
  PRECONDOR_RETURN_IF_ERROR(Barrier());
  if (rank != root) std::copy(Slot(root), Slot(root) + matrix.size(), matrix.data);
  return Barrier();
}

}  // namespace precondor::digits
