// SPDX-License-Identifier: Apache-2.0
// A dense symmetric factor M [d, d] too large for one device: each rank of a Collective holds some of its rows, in f32.
//   Rank r holds rows [r block, (r + 1) block) as far as they are there, block = ceil(d / size): the last rank with
//   rows may have fewer, and ranks after it none. Statistic vectors and results are the same on all ranks, bit for bit,
//   so that only O(k d) elements travel for k vectors, and those of a gradient for a gradient.
//
// Collective: Multiply, ShermanMorrison and the two Preconditions are calls that all ranks make together, in the same
//   order, with the same shapes and numbers. A rank whose backend fails in one leaves the others to the time-out.
// Errors: InvalidArgument for shapes, before anything is sent; those of Backend and Collective, after which results are
//   unspecified, and M too where they come from the last step of Update or ShermanMorrison, which changes it.
// Symmetry: of M as all ranks hold it, up to rounding.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/collective.h"

namespace precondor {

class RowSplitFactor {
 public:
  // M = I. InvalidArgument when d < 1, or when the collective moves another backend's memory; Unimplemented on cuda,
  // whose collective would not wait for the backend's stream. Both must outlive it. `timeout` is for each collective
  // operation.
  static absl::StatusOr<std::unique_ptr<RowSplitFactor>> Make(int64_t d, absl::Duration timeout, Backend& backend,
                                                              Collective& ranks);
  // On the rank with most rows.
  static int64_t StateBytes(int64_t d, int size);

  // This rank's rows of M [count(), d], the first of which is row begin().
  int64_t begin() const { return begin_; }
  int64_t count() const { return rows_.rows(); }
  ConstMatrixView rows() const { return rows_.view(); }

  // y = v M for v, y [k, d]. y may be v. Cost: 2 k d^2 / size FLOP, an all-gather of k d elements.
  absl::Status Multiply(ConstMatrixView v, MatrixView y);
  // M = decay M + shift I + weight sum_i v_i v_i' for v [k, d]. Nothing travels.
  absl::Status Update(double decay, double shift, double weight, ConstMatrixView v);
  // M = (H^-1 + sum_i v_i v_i')^-1 with H = decay M + shift I, for v [k, d] and k at most some dozens: BLEND and
  // REFERENCE of docs/methods/mkor.md. FailedPrecondition when v is not finite or H not positive.
  absl::Status ShermanMorrison(double decay, double shift, ConstMatrixView v);
  // u = M g r for a gradient g [d, n] and dense r [n, n] that all ranks have; so is u [d, n], which may be g. Every
  // rank computes its rows, which are gathered.
  absl::Status Precondition(ConstMatrixView g, ConstMatrixView r, MatrixView u);
  // The same where each rank has, and gets, its rows of g and u [count(), n] alone: products with M's columns are
  // summed and scattered. u may be g.
  absl::Status PreconditionRows(ConstMatrixView g, ConstMatrixView r, MatrixView u);

 private:
  RowSplitFactor(int64_t d, absl::Duration timeout, Backend& backend, Collective& ranks);
  absl::Status CheckShape(const char* what, ConstMatrixView x, int64_t rows, int64_t cols) const;
  // Columns [begin(), begin() + count()).
  template <typename View>
  View OwnColumns(View x) const {
    return View(x.size() == 0 ? nullptr : x.data + begin_, x.rows, count(), x.stride);
  }
  // With its columns gathered from all ranks, [k, padded()], of which the first d count.
  absl::StatusOr<DeviceMatrix> Product(ConstMatrixView v);
  int64_t padded() const { return block_ * ranks_.size(); }

  const int64_t d_;
  const absl::Duration timeout_;
  Backend& backend_;
  Collective& ranks_;
  const int64_t block_;
  const int64_t begin_;
  DeviceMatrix rows_;
};

}  // namespace precondor
