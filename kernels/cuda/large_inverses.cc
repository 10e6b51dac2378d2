// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/decompositions.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/packed_upload.h"

namespace precondor::cuda {
namespace {

constexpr absl::string_view kName = "SpdInverse";
constexpr double kOne = 1, kZero = 0;

// Returns the number of matrices of n rows in a call, which does not depend on how many there are. They take 256 MiB at
// most. Calls with fewer than eight are no faster than as many calls with one.
int64_t SizeOfCall(int64_t n) {
  constexpr int64_t kMost = 64, kLeast = 8, kMultiplications = int64_t{1} << 34, kElements = int64_t{1} << 24;
  const int64_t fitting = std::min({kMost, kMultiplications / (n * n * n), kElements / (n * n)});
  return fitting < kLeast ? 1 : fitting;
}

class InverseBatches {
 public:
  using Inverse = operation::SpdInverse;

  InverseBatches(absl::Span<const Inverse* const> operations, int64_t most_scratch_bytes)
      : operations_(operations), most_scratch_bytes_(most_scratch_bytes), order_(operations.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](size_t i, size_t j) { return RowsOf(i) < RowsOf(j); });
  }

  // Allocates all memory.
  absl::Status Open(Device& device) {
    const int64_t elements = Divide();
    jobs_ = upload_.Add<DecompositionJob>(job_count_);
    infos_ = upload_.Add<int>(places_);
    wide_ = upload_.Add<double*>(places_);
    roots_ = upload_.Add<double*>(places_);
    PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
    PRECONDOR_ASSIGN_OR_RETURN(memory_, device.Array<double>(elements));
    PRECONDOR_ASSIGN_OR_RETURN(outcomes_, device.Array<double>(static_cast<int64_t>(job_count_)));
    PRECONDOR_ASSIGN_OR_RETURN(const int work, WorkSize(device));
    PRECONDOR_ASSIGN_OR_RETURN(work_, device.Array<double>(work));
    for (const Part& part : parts_) Fill(part);
    return upload_.Send(device);
  }

  absl::Status Run(Device& device) const {
    for (const Part& part : parts_) {
      PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
        return WidenSymmetric(stream, upload_.OnDevice(jobs_) + part.job, part.jobs, outcomes_.data() + part.job);
      }));
      for (const Batch& batch : part.batches) {
        for (size_t at = 0; at < batch.places; at += static_cast<size_t>(batch.size)) {
          PRECONDOR_RETURN_IF_ERROR(batch.size == 1 ? InvertOne(device, batch.n, batch.place + at)
                                                    : Invert(device, batch, batch.place + at));
        }
      }
      PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
        return NarrowResults(stream, upload_.OnDevice(jobs_) + part.job, part.jobs, outcomes_.data() + part.job);
      }));
    }
    return absl::OkStatus();
  }

  absl::Status Learn(Device& device, absl::Span<absl::Status> statuses) const {
    std::vector<double> outcomes(job_count_);
    PRECONDOR_RETURN_IF_ERROR(device.Receive(outcomes_, absl::MakeSpan(outcomes)));
    for (const Part& part : parts_) {
      for (size_t i = part.begin; i < part.end; ++i) {
        const int outcome = static_cast<int>(outcomes[part.job + (i - part.begin)]);
        statuses[order_[i]] = InverseStatus(outcome, RowsOf(order_[i]));
      }
    }
    return absl::OkStatus();
  }

 private:
  // Matrices [begin, end) of the order, of n rows, in the arrays of addresses from `place` on.
  struct Batch {
    size_t begin, end;
    int64_t n, size;
    size_t place = 0, places = 0;
    bool has_unused() const { return places > end - begin; }
  };
  // Matrices [begin, end) that are inverted at the same time. Their jobs are [job, job + jobs); the last one is that of
  // the memory that unused places share, if there are such places.
  struct Part {
    size_t begin, end;
    size_t job = 0;
    int jobs = 0;
    std::vector<Batch> batches = {};
  };

  int64_t RowsOf(size_t i) const { return operations_[i]->x.rows; }
  // Numbers of elements of a matrix, and of it and its root's inverse.
  static int64_t OfMatrix(int64_t n) { return PaddedElements<double>(n * n); }
  static int64_t Elements(int64_t n) { return 2 * OfMatrix(n); }

  // Makes parts of whole calls, and their batches. Returns the largest number of elements of a part.
  int64_t Divide() {
    int64_t used = 0, most = 0;
    for (size_t i = 0; i < order_.size(); ++i) {
      const int64_t n = RowsOf(order_[i]), size = SizeOfCall(n);
      const bool begins_batch = i == 0 || n != RowsOf(order_[i - 1]);
      const bool begins_call =
          begins_batch || (i - parts_.back().batches.back().begin) % static_cast<size_t>(size) == 0;
      const int64_t bytes = (used + size * Elements(n)) * static_cast<int64_t>(sizeof(double));
      if (i == 0 || (begins_call && bytes > most_scratch_bytes_)) {
        parts_.push_back({i, i});
        used = 0;
      }
      Part& part = parts_.back();
      if (begins_batch || part.batches.empty()) part.batches.push_back({i, i, n, size});
      part.end = part.batches.back().end = i + 1;
      used += Elements(n);
      most = std::max(most, used);
    }
    int64_t shared = 0;
    for (Part& part : parts_) {
      size_t jobs = part.end - part.begin;
      for (Batch& batch : part.batches) {
        batch.places = PlacesOf(batch.end - batch.begin, batch.size);
        batch.place = std::exchange(places_, places_ + batch.places);
        if (!batch.has_unused()) continue;
        jobs = part.end - part.begin + 1;
        shared = std::max(shared, Elements(batch.n));
      }
      part.jobs = static_cast<int>(jobs);
      part.job = std::exchange(job_count_, job_count_ + jobs);
    }
    return most + shared;
  }

  // Returns the number of elements that cuSOLVER needs for calls with one matrix.
  absl::StatusOr<int> WorkSize(Device& device) const {
    int most = 0;
    for (const Part& part : parts_) {
      for (const Batch& batch : part.batches) {
        if (batch.size > 1) continue;
        int size = 0;
        PRECONDOR_RETURN_IF_ERROR(device.QuerySolver(kName, [&](cusolverDnHandle_t solver) {
          const int n = static_cast<int>(batch.n);
          return cusolverDnDpotrf_bufferSize(solver, CUBLAS_FILL_MODE_LOWER, n, memory_.data(), n, &size);
        }));
        most = std::max(most, size);
      }
    }
    return most;
  }

  void Fill(const Part& part) {
    double* next = memory_.data();
    size_t job = part.job;
    for (const Batch& batch : part.batches) {
      for (size_t i = batch.begin; i < batch.end; ++i) {
        const size_t place = batch.place + (i - batch.begin);
        Set(place, next, batch.n);
        upload_.OnHost(jobs_)[job++] = {.a = operations_[order_[i]]->a,
                                        .wide = next,
                                        .identity = next + OfMatrix(batch.n),
                                        .info = upload_.OnDevice(infos_) + place,
                                        .x = operations_[order_[i]]->x,
                                        .symmetric = true};
        next += Elements(batch.n);
      }
    }
    for (const Batch& batch : part.batches) {  // of ascending sizes: the last one sets all of the shared memory
      for (size_t i = batch.end - batch.begin; i < batch.places; ++i) Set(batch.place + i, next, batch.n);
      if (!batch.has_unused()) continue;
      DecompositionJob& unused = upload_.OnHost(jobs_)[job];
      unused = upload_.OnHost(jobs_)[part.job + (batch.begin - part.begin)];
      unused.wide = next;
      unused.identity = next + OfMatrix(batch.n);
      unused.x = {};
    }
  }
  void Set(size_t place, double* wide, int64_t n) {
    upload_.OnHost(wide_)[place] = wide;
    upload_.OnHost(roots_)[place] = wide + OfMatrix(n);
  }

  // For all matrices a of a call: a = l l', w = l^-1 I, a = w' w.
  absl::Status Invert(Device& device, const Batch& batch, size_t place) const {
    const int64_t n = batch.n;
    double** const a = upload_.OnDevice(wide_) + place;
    double** const w = upload_.OnDevice(roots_) + place;
    PRECONDOR_RETURN_IF_ERROR(device.RunSolver(kName, [&](cusolverDnHandle_t solver) {
      return cusolverDnDpotrfBatched(solver, CUBLAS_FILL_MODE_LOWER, static_cast<int>(n), a, static_cast<int>(n),
                                     upload_.OnDevice(infos_) + place, static_cast<int>(batch.size));
    }));
    PRECONDOR_RETURN_IF_ERROR(device.RunBlas(kName, [&](cublasHandle_t blas) {
      return cublasDtrsmBatched_64(blas, CUBLAS_SIDE_LEFT, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_N, CUBLAS_DIAG_NON_UNIT, n,
                                   n, &kOne, a, n, w, n, batch.size);
    }));
    return device.RunBlas(kName, [&](cublasHandle_t blas) {
      return cublasDgemmBatched_64(blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &kOne, w, n, w, n, &kZero, a, n,
                                   batch.size);
    });
  }
  absl::Status InvertOne(Device& device, int64_t n, size_t place) const {
    double* const a = upload_.OnHost(wide_)[place];
    double* const w = upload_.OnHost(roots_)[place];
    PRECONDOR_RETURN_IF_ERROR(device.RunSolver(kName, [&](cusolverDnHandle_t solver) {
      return cusolverDnDpotrf(solver, CUBLAS_FILL_MODE_LOWER, static_cast<int>(n), a, static_cast<int>(n), work_.data(),
                              static_cast<int>(work_.size()), upload_.OnDevice(infos_) + place);
    }));
    PRECONDOR_RETURN_IF_ERROR(device.RunBlas(kName, [&](cublasHandle_t blas) {
      return cublasDtrsm_64(blas, CUBLAS_SIDE_LEFT, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_N, CUBLAS_DIAG_NON_UNIT, n, n,
                            &kOne, a, n, w, n);
    }));
    return device.RunBlas(kName, [&](cublasHandle_t blas) {
      return cublasDgemm_64(blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &kOne, w, n, w, n, &kZero, a, n);
    });
  }

  const absl::Span<const Inverse* const> operations_;
  const int64_t most_scratch_bytes_;
  std::vector<size_t> order_;  // of operations, by size
  std::vector<Part> parts_;
  size_t job_count_ = 0, places_ = 0;
  PackedUpload upload_;
  PackedUpload::Part<DecompositionJob> jobs_;
  PackedUpload::Part<int> infos_;
  PackedUpload::Part<double*> wide_, roots_;
  DeviceArray<double> memory_, outcomes_, work_;
};

}  // namespace

absl::Status RunLarge(Device& device, absl::Span<const operation::SpdInverse* const> operations,
                      absl::Span<absl::Status> statuses, int64_t most_scratch_bytes) {
  InverseBatches inverses(operations, most_scratch_bytes);
  PRECONDOR_RETURN_IF_ERROR(inverses.Open(device));
  PRECONDOR_RETURN_IF_ERROR(inverses.Run(device));
  return inverses.Learn(device, statuses);
}

}  // namespace precondor::cuda
