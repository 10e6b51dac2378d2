// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/batched_products.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/grouped_operations.h"
#include "kernels/cuda/packed_upload.h"
#include "kernels/cuda/reductions.h"
#include "kernels/cuda/sorted_rows.h"

namespace precondor::cuda {
namespace {

constexpr absl::string_view kName = "OrthogonalIteration";

// cuSOLVER factorizes column-major lower triangles faster than upper ones, and g has both.
constexpr cublasFillMode_t kTriangle = CUBLAS_FILL_MODE_LOWER;

using Step = operation::OrthogonalIteration;

auto KeyOf(const Step& step) { return std::tuple(step.q.rows, step.q.stride, step.a.stride, step.next.stride); }
int64_t Elements(int64_t rows, int64_t stride) { return PaddedElements<float>(rows * stride); }
// Larger than the rounding of g, whose diagonal is 1, so that the first factorization succeeds for most x.
double ShiftOf(int64_t n) { return 4 * static_cast<double>(n) * std::numeric_limits<float>::epsilon(); }
int64_t Elements(const Step& step) { return Elements(step.q.rows, step.q.cols); }

class Iterations {
 public:
  Iterations(absl::Span<const Step* const> operations, int64_t most_scratch_bytes)
      : most_scratch_bytes_(most_scratch_bytes), order_(operations.size()) {
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t i, size_t j) { return KeyOf(*operations[i]) < KeyOf(*operations[j]); });
    for (const size_t i : order_) steps_.push_back(operations[i]);
  }

  // Allocates all memory.
  absl::Status Open(Device& device) {
    int64_t elements = 0, rows = 0, pieces = 0;
    Divide(elements);
    for (const Step* step : steps_) {
      rows += step->q.rows;
      pieces += 2 * ReductionPartials(step->q);
    }
    sorts_ = upload_.Add<SortedRowsJob>(steps_.size());
    shifts_ = upload_.Add<ElementwiseJob>(steps_.size());
    dots_ = upload_.Add<DotJob>(2 * steps_.size());
    for (PackedUpload::Part<void*>* part : {&q_, &a_, &p_, &g_, &x_}) *part = upload_.Add<void*>(places_);
    PRECONDOR_RETURN_IF_ERROR(upload_.Open(device));
    PRECONDOR_ASSIGN_OR_RETURN(memory_, device.Array<float>(elements));
    PRECONDOR_ASSIGN_OR_RETURN(numbers_, device.Array<double>(2 * rows + pieces));
    PRECONDOR_ASSIGN_OR_RETURN(infos_, device.Array<int>(static_cast<int64_t>(places_)));
    PRECONDOR_ASSIGN_OR_RETURN(outcome_, device.Array<double>(Squares() + (rows + 1) / 2));
    PRECONDOR_ASSIGN_OR_RETURN(const int work, WorkSize(device));
    PRECONDOR_ASSIGN_OR_RETURN(work_, device.Array<float>(work));
    partials_ = numbers_.data() + 2 * rows;
    int64_t row = 0;
    for (Part& part : parts_) Fill(part, row);
    return upload_.Send(device);
  }

  absl::Status Run(Device& device) const {
    for (const Part& part : parts_) {
      PRECONDOR_RETURN_IF_ERROR(Multiply(device, part, {q_, a_, p_}, false));
      for (const auto launch : {RowEstimates, SortRows}) {
        PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
          return launch(stream, upload_.OnDevice(sorts_) + part.begin, Count(part), part.rows);
        }));
      }
      for (const Round round : {kShifted, kPlain, kChecked}) {
        PRECONDOR_RETURN_IF_ERROR(Multiply(device, part, {x_, x_, g_}, true));
        if (round == kShifted) {
          PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
            return Elementwise(stream, upload_.OnDevice(shifts_) + part.begin, Count(part), part.blocks);
          }));
        }
        if (round == kChecked) {
          PRECONDOR_RETURN_IF_ERROR(device.Run(kName, [&](cudaStream_t stream) {
            return Dots(stream, upload_.OnDevice(dots_) + 2 * part.begin, 2 * Count(part), part.pieces, partials_,
                        outcome_.data() + 2 * part.begin);
          }));
        }
        PRECONDOR_RETURN_IF_ERROR(Orthonormalize(device, part));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Learn(Device& device, absl::Span<bool> done) const {
    std::vector<double> known(static_cast<size_t>(outcome_.size()));
    PRECONDOR_RETURN_IF_ERROR(device.Receive(outcome_, absl::MakeSpan(known)));
    const int* order = reinterpret_cast<const int*>(known.data() + Squares());
    for (size_t i = 0; i < steps_.size(); ++i) {
      // |g - I|^2 = |g|^2 - 2 tr(x x') + n. It is NaN after a division by zero.
      const double square = known[2 * i] - 2 * known[2 * i + 1] + static_cast<double>(steps_[i]->q.rows);
      done[order_[i]] = square < kLargestDistance * kLargestDistance;
      if (done[order_[i]]) std::copy_n(order, steps_[i]->order.size(), steps_[i]->order.begin());
      order += steps_[i]->order.size();
    }
    return absl::OkStatus();
  }

 private:
  enum Round { kShifted, kPlain, kChecked };
  // Steps [begin, end) of one key, in the arrays of addresses from `place` on.
  struct Batch {
    size_t begin, end, place, places;
    int64_t size;
  };
  // Steps [begin, end) that run at the same time.
  struct Part {
    size_t begin, end;
    std::vector<Batch> batches = {};
    int64_t rows = 0, blocks = 0, pieces = 0;
  };
  static int Count(const Part& part) { return static_cast<int>(part.end - part.begin); }
  int64_t Squares() const { return 2 * static_cast<int64_t>(steps_.size()); }

  // Makes parts and their batches. Sets `elements` to the largest number that a part takes: p and g of each step, and
  // g and x, which has the stride of `next`, that unused places share.
  void Divide(int64_t& elements) {
    int64_t used = 0, unused = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const int64_t n = steps_[i]->q.rows, own = 2 * Elements(*steps_[i]);
      if (parts_.empty() || (used + own) * static_cast<int64_t>(sizeof(float)) > most_scratch_bytes_) {
        parts_.push_back({i, i});
        used = unused = 0;
      }
      Part& part = parts_.back();
      if (part.batches.empty() || KeyOf(*steps_[part.batches.back().begin]) != KeyOf(*steps_[i])) {
        part.batches.push_back({i, i, 0, 0, FixedBatches::Size({.rows = n, .cols = n, .inner = n})});
      }
      part.end = part.batches.back().end = i + 1;
      used += own;
      unused = std::max(unused, Elements(*steps_[i]) + Elements(n, steps_[i]->next.stride));
      elements = std::max(elements, used + unused);
    }
    for (Part& part : parts_) {
      for (Batch& batch : part.batches) {
        batch.places = PlacesOf(batch.end - batch.begin, batch.size);
        batch.place = std::exchange(places_, places_ + batch.places);
      }
    }
  }

  // Returns the number of elements that cuSOLVER needs for batches of one.
  absl::StatusOr<int> WorkSize(Device& device) const {
    int most = 0;
    for (const Part& part : parts_) {
      for (const Batch& batch : part.batches) {
        if (batch.size > 1) continue;
        const int n = static_cast<int>(steps_[batch.begin]->q.rows);
        int size = 0;
        PRECONDOR_RETURN_IF_ERROR(device.QuerySolver(kName, [&](cusolverDnHandle_t solver) {
          return cusolverDnSpotrf_bufferSize(solver, kTriangle, n, memory_.data(), n, &size);
        }));
        most = std::max(most, size);
      }
    }
    return most;
  }

  void Fill(Part& part, int64_t& row) {
    float* next = memory_.data();
    const auto take = [&](const Step& step) { return std::exchange(next, next + Elements(step)); };
    for (const Batch& batch : part.batches) {
      for (size_t i = batch.begin; i < batch.end; ++i) {
        const Step& step = *steps_[i];
        const int64_t n = step.q.rows;
        const MatrixView p(take(step), n, n), g(take(step), n, n);
        Set(batch.place + (i - batch.begin), step, p.data, g.data, step.next.data);
        upload_.OnHost(sorts_)[i] = {.q = step.q,
                                     .p = p,
                                     .estimates = numbers_.data() + 2 * row,
                                     .squares = numbers_.data() + 2 * row + n,
                                     .sorted = step.next,
                                     .order = reinterpret_cast<int*>(outcome_.data() + Squares()) + row,
                                     .first = part.rows};
        ElementwiseJob& shift = upload_.OnHost(shifts_)[i];
        shift = {
            .kind = ElementwiseKind::kAddDiagonal, .alpha = ShiftOf(n), .x = g, .v = {}, .y = g, .first = part.blocks};
        part.blocks += ElementwiseBlocks(shift);
        for (const size_t which : {0, 1}) {
          const ConstMatrixView x = which == 0 ? ConstMatrixView(g) : ConstMatrixView(step.next);
          upload_.OnHost(dots_)[2 * i + which] = {x, x, part.pieces};
          part.pieces += ReductionPartials(x);
        }
        part.rows += n;
        row += n;
      }
    }
    for (const Batch& batch : part.batches) {
      const Step& first = *steps_[batch.begin];
      for (size_t i = batch.end - batch.begin; i < batch.places; ++i) {
        Set(batch.place + i, first, next, next, next + Elements(first));
      }
    }
  }
  void Set(size_t place, const Step& step, float* p, float* g, float* x) {
    upload_.OnHost(q_)[place] = const_cast<float*>(step.q.data);
    upload_.OnHost(a_)[place] = const_cast<float*>(step.a.data);
    upload_.OnHost(p_)[place] = p;
    upload_.OnHost(g_)[place] = g;
    upload_.OnHost(x_)[place] = x;
  }

  // Calls run(batch, place) for the places of each call.
  template <typename Run>
  static absl::Status ForEachCall(const Part& part, Run run) {
    for (const Batch& batch : part.batches) {
      for (size_t at = 0; at < batch.places; at += static_cast<size_t>(batch.size)) {
        PRECONDOR_RETURN_IF_ERROR(run(batch, batch.place + at));
      }
    }
    return absl::OkStatus();
  }

  // p = q a, or g = x x'.
  absl::Status Multiply(Device& device, const Part& part, const Pointers& of, bool gram) const {
    return ForEachCall(part, [&](const Batch& batch, size_t place) {
      const Step& step = *steps_[batch.begin];
      const int64_t n = step.q.rows, of_x = step.next.stride;
      const ProductShape shape = {.rows = n,
                                  .cols = n,
                                  .inner = n,
                                  .stride_a = gram ? of_x : step.q.stride,
                                  .stride_b = gram ? of_x : step.a.stride,
                                  .stride_c = n,
                                  .transpose_b = gram};
      return RunBatch(device, kName, shape, kInF32, upload_, of, place, place + static_cast<size_t>(batch.size));
    });
  }

  // x = l^-1 x for g = l l'.
  absl::Status Orthonormalize(Device& device, const Part& part) const {
    const float one = 1;
    PRECONDOR_RETURN_IF_ERROR(ForEachCall(part, [&](const Batch& batch, size_t place) {
      const int n = static_cast<int>(steps_[batch.begin]->q.rows);
      return device.RunSolver(kName, [&](cusolverDnHandle_t solver) {
        if (batch.size == 1) {
          return cusolverDnSpotrf(solver, kTriangle, n, OnlyOf(g_, place), n, work_.data(),
                                  static_cast<int>(work_.size()), infos_.data() + place);
        }
        return cusolverDnSpotrfBatched(solver, kTriangle, n, AllOf(g_, place), n, infos_.data() + place,
                                       static_cast<int>(batch.size));
      });
    }));
    return ForEachCall(part, [&](const Batch& batch, size_t place) {
      const int64_t n = steps_[batch.begin]->q.rows, of_x = steps_[batch.begin]->next.stride;
      constexpr int64_t kMostAlone = 8;  // up to which a call for each is faster than one for all
      if (batch.size <= kMostAlone) {
        const size_t used = batch.place + (batch.end - batch.begin);
        for (const size_t end = std::min(place + static_cast<size_t>(batch.size), used); place < end; ++place) {
          PRECONDOR_RETURN_IF_ERROR(device.RunBlas(kName, [&](cublasHandle_t blas) {
            return cublasStrsm_64(blas, CUBLAS_SIDE_RIGHT, kTriangle, CUBLAS_OP_T, CUBLAS_DIAG_NON_UNIT, n, n, &one,
                                  OnlyOf(g_, place), n, OnlyOf(x_, place), of_x);
          }));
        }
        return absl::OkStatus();
      }
      return device.RunBlas(kName, [&](cublasHandle_t blas) {
        return cublasStrsmBatched_64(blas, CUBLAS_SIDE_RIGHT, kTriangle, CUBLAS_OP_T, CUBLAS_DIAG_NON_UNIT, n, n, &one,
                                     AllOf(g_, place), n, AllOf(x_, place), of_x, batch.size);
      });
    });
  }
  float* OnlyOf(PackedUpload::Part<void*> addresses, size_t place) const {
    return static_cast<float*>(upload_.OnHost(addresses)[place]);
  }
  float** AllOf(PackedUpload::Part<void*> addresses, size_t place) const {
    return reinterpret_cast<float**>(upload_.OnDevice(addresses) + place);
  }

  const int64_t most_scratch_bytes_;
  std::vector<size_t> order_;       // of the caller's operations
  std::vector<const Step*> steps_;  // in that order
  std::vector<Part> parts_;
  size_t places_ = 0;
  PackedUpload upload_;
  PackedUpload::Part<SortedRowsJob> sorts_;
  PackedUpload::Part<ElementwiseJob> shifts_;
  PackedUpload::Part<DotJob> dots_;  // |g|^2 and |x|^2 of each step
  PackedUpload::Part<void*> q_, a_, p_, g_, x_;
  DeviceArray<float> memory_, work_;
  DeviceArray<double> numbers_;  // estimates and squares of rows, then partial sums
  double* partials_ = nullptr;
  DeviceArray<int> infos_;       // not read: |g - I| says more
  DeviceArray<double> outcome_;  // the squares of all steps, then their orders as ints
};

}  // namespace

absl::Status RunOrthogonalIterations(Device& device, absl::Span<const Step* const> operations, absl::Span<bool> done,
                                     int64_t most_scratch_bytes) {
  Iterations iterations(operations, most_scratch_bytes);
  PRECONDOR_RETURN_IF_ERROR(iterations.Open(device));
  PRECONDOR_RETURN_IF_ERROR(iterations.Run(device));
  return iterations.Learn(device, done);
}

}  // namespace precondor::cuda
