// SPDX-License-Identifier: Apache-2.0
// The job's own all-reduce for DELEGATE, where the service takes part with already averaged gradients: shared memory
// between the worker processes of one machine. Sums run in rank order, so that every process gets the same bits.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/matrix_view.h"

namespace precondor::digits {

// All ranks must make the same calls in the same order; each waits for the others and returns DeadlineExceeded when
// they do not come in `timeout`. One thread a rank; ranks may be processes or threads that share one object.
class SharedReducer {
 public:
  struct Shape {
    int32_t ranks = 1;
    int64_t max_elements = 0;  // of the largest matrix
  };

  // A new region; hand fd() down to the other processes.
  static absl::StatusOr<std::unique_ptr<SharedReducer>> Create(Shape shape, absl::Duration timeout);
  // The region behind an inherited descriptor, which the object then owns. The shape must be the creator's.
  static absl::StatusOr<std::unique_ptr<SharedReducer>> Attach(int fd, Shape shape, absl::Duration timeout);
  ~SharedReducer();
  SharedReducer(const SharedReducer&) = delete;
  SharedReducer& operator=(const SharedReducer&) = delete;

  int fd() const { return fd_; }

  // matrix = sum_i weight_i matrix_i / sum_i weight_i over the ranks, in f64. Contiguous, shapes equal on all ranks.
  absl::Status WeightedMean(int32_t rank, double weight, MatrixView matrix);
  // matrix = that of rank `root`.
  absl::Status Broadcast(int32_t rank, int32_t root, MatrixView matrix);
  // Waits for every rank.
  absl::Status Barrier();

 private:
  struct Region;
  SharedReducer(int fd, Region* region, Shape shape, absl::Duration timeout);
  float* Slot(int32_t rank) const;
  double* Weights() const;
  absl::Status CheckFits(MatrixView matrix) const;

  const int fd_;
  Region* const region_;
  const Shape shape_;
  const absl::Duration timeout_;
};

}  // namespace precondor::digits
