// SPDX-License-Identifier: Apache-2.0
// A dense symmetric factor M [d, d] that is too large for one device: each rank of a DeviceGroup holds some of its
// rows, in f32.
//   Rank r holds the existing rows of [r block, (r + 1) block), block = ceil(d / size): the last rank with rows may
//   have fewer, and later ranks none. Statistic vectors and terms are on all ranks, so that only O(k d) elements travel
//   for k vectors, and only the elements of a gradient for a gradient. M is symmetric up to rounding: a rank's rows
//   serve as its columns too.
//
// Collective: calls that take a Rank, this factor's own, must be made by all ranks together, in the same order, with
//   equal shapes and numbers. Transfers of their inputs to the backend's device may still be under way.
// Errors: InvalidArgument for shapes, before anything is sent; those of Backend and Collective. They leave M unchanged,
//   except those of Apply and Upload.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/device_group.h"

namespace precondor {

class RowSplitFactor {
 public:
  using Rank = DeviceGroup::Rank;
  // Makes this rank's part of M = I. Returns InvalidArgument if d < 1. `backend` must outlive it.
  static absl::StatusOr<std::unique_ptr<RowSplitFactor>> Make(int64_t d, int rank, int size, Backend& backend);
  // Bytes on the rank with the most rows.
  static int64_t StateBytes(int64_t d, int size);

  // This rank's rows of M [count(), d]; the first is row begin().
  int64_t begin() const { return begin_; }
  int64_t count() const { return rows_.rows(); }
  ConstMatrixView rows() const { return rows_.view(); }

  // Returns the terms [k, d] of Backend::ShermanMorrisonTerms for v [k, d] and h = decay M + shift I, `block` vectors
  // at a time. Returns FailedPrecondition if v is not finite. Cost: 2 k d^2 / size FLOP and an all-gather of k d
  // elements. Scratch: (2 k + block) (d + size) elements.
  absl::StatusOr<DeviceMatrix> Terms(const Rank& rank, double decay, double shift, ConstMatrixView v, int64_t block);
  // M = decay M + shift I - left' right for left, right [k, d]. Sends nothing and allocates no device memory.
  absl::Status Apply(double decay, double shift, ConstMatrixView left, ConstMatrixView right);
  // Replaces rows [begin() + first, ...) of M by those of the host.
  absl::Status Upload(int64_t first, ConstMatrixView host);

  // Returns M g for g [d, n], in the first d rows of the result. Every rank computes its rows, which are then gathered.
  absl::StatusOr<DeviceMatrix> Left(const Rank& rank, ConstMatrixView g);
  // u = g M for g, u [m, d]. Every rank computes its columns, which are then gathered. A rank that passes an empty u
  // only helps.
  absl::Status Right(const Rank& rank, ConstMatrixView g, MatrixView u);

 private:
  RowSplitFactor(int64_t d, int rank, int size, Backend& backend);
  absl::Status CheckShape(const char* what, ConstMatrixView x, int64_t rows, int64_t cols) const;
  absl::Status CheckRank(const Rank& rank) const;
  // Returns columns [begin(), begin() + count()).
  template <typename View>
  View OwnColumns(View x) const {
    return View(x.size() == 0 ? nullptr : x.data + begin_, x.rows, count(), x.stride);
  }
  // Returns v M with its columns gathered from all ranks, [k, padded()]; the first d columns are valid.
  absl::StatusOr<DeviceMatrix> Product(const Rank& rank, ConstMatrixView v);
  int64_t padded() const { return block_ * size_; }

  const int64_t d_;
  const int rank_;
  const int size_;
  Backend& backend_;
  const int64_t block_;
  const int64_t begin_;
  DeviceMatrix rows_;
};

}  // namespace precondor
