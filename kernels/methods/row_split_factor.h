// SPDX-License-Identifier: Apache-2.0
// A dense symmetric factor M [d, d] too large for one device: each rank of a DeviceGroup holds some of its rows, in
// f32.
//   Rank r holds rows [r block, (r + 1) block) as far as they are there, block = ceil(d / size): the last rank with
//   rows may have fewer, and ranks after it none. Statistic vectors and terms are on all ranks, so that only O(k d)
//   elements travel for k vectors, and those of a gradient for a gradient. M is symmetric up to rounding: a rank's rows
//   stand for its columns too.
//
// Collective: calls that take a Rank, this factor's own, are made by all ranks together, in the same order, with the
//   same shapes and numbers; what they read may be on its way to the backend's device still.
// Errors: InvalidArgument for shapes, before anything is sent; those of Backend and Collective, which leave M alone,
//   but for Apply's and Upload's.
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
  // M = I. InvalidArgument when d < 1. `backend` must outlive it.
  static absl::StatusOr<std::unique_ptr<RowSplitFactor>> Make(int64_t d, int rank, int size, Backend& backend);
  // On the rank with most rows.
  static int64_t StateBytes(int64_t d, int size);

  // This rank's rows of M [count(), d], the first of which is row begin().
  int64_t begin() const { return begin_; }
  int64_t count() const { return rows_.rows(); }
  ConstMatrixView rows() const { return rows_.view(); }

  // The terms [k, d] of Backend::ShermanMorrisonTerms for v [k, d], `block` vectors at a time, where h is
  // decay M + shift I. FailedPrecondition when v is not finite. Cost: 2 k d^2 / size FLOP and an all-gather of k d
  // elements. Scratch: (2 k + block) (d + size) elements.
  absl::StatusOr<DeviceMatrix> Terms(const Rank& rank, double decay, double shift, ConstMatrixView v, int64_t block);
  // M = decay M + shift I - left' right for left, right [k, d]. Nothing travels, and the device needs no memory for it.
  absl::Status Apply(double decay, double shift, ConstMatrixView left, ConstMatrixView right);
  // Rows [begin() + first, ...) of M become those of the host.
  absl::Status Upload(int64_t first, ConstMatrixView host);

  // M g for g [d, n], in the first d rows of what comes back: every rank computes its rows, which are gathered.
  absl::StatusOr<DeviceMatrix> Left(const Rank& rank, ConstMatrixView g);
  // u = g M for g, u [m, d], likewise by columns. A rank that passes a u without elements only helps.
  absl::Status Right(const Rank& rank, ConstMatrixView g, MatrixView u);

 private:
  RowSplitFactor(int64_t d, int rank, int size, Backend& backend);
  absl::Status CheckShape(const char* what, ConstMatrixView x, int64_t rows, int64_t cols) const;
  absl::Status CheckRank(const Rank& rank) const;
  // Columns [begin(), begin() + count()).
  template <typename View>
  View OwnColumns(View x) const {
    return View(x.size() == 0 ? nullptr : x.data + begin_, x.rows, count(), x.stride);
  }
  // v M, with its columns gathered from all ranks, [k, padded()], of which the first d count.
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
