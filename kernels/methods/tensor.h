// SPDX-License-Identifier: Apache-2.0
// Tensors of several dimensions by way of matrices, for methods with a factor for each dimension. A tensor is a
// row-major sequence of elements; what it is multiplied by along one of its dimensions (its mode) multiplies a matrix.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"

namespace precondor {

class OptionReader;

int64_t ElementsOf(absl::Span<const int64_t> dims);

// `dims` with neighbours multiplied together where that brings the products nearest to `target`, by the penalty of
// `distributed_kron`'s _merge_small_dims: log2(target / d) below the target and 100 log2(target / (8 d)) more below an
// eighth of it; 10 log2(d / target) above and 1000 log2(d / (8 target)) more beyond eight times it. Of equals that with
// the shortest first group. Dimensions of 1 go with any neighbour. Unlike there, no product of several dimensions
// exceeds `longest`. target >= 1; dims of at least one element, all positive.
std::vector<int64_t> MergeSmallDims(absl::Span<const int64_t> dims, int64_t target, int64_t longest);

// From a layer's dimensions to the sides that have factors, by the options of these names.
struct DimMerging {
  bool merge_small_dims = true;
  int64_t target_merged_dim_size = 256;

  static DimMerging Read(OptionReader& reader);
  // The layer's dimensions, merged where there are more than two.
  std::vector<int64_t> Sides(const LayerSpec& layer, int64_t longest) const;
};

// One mode of a tensor as a matrix, [d, the rest] (side() == From::kLeft) or [the rest, d] (kRight): what multiplies
// along the mode does so from that side, and the Gram matrix of that side is the mode's. A view into the tensor for the
// first and the last mode; a copy for one between others, which WriteBack brings back. One thread.
class ModeMatrix {
 public:
  // Two dimensions: x is [dims[0], dims[1]] of any stride. Otherwise x is contiguous and its rows and columns mean
  // nothing. x must outlive the result. Scratch: x's elements for a mode between others.
  static absl::StatusOr<ModeMatrix> Of(absl::Span<const int64_t> dims, size_t mode, MatrixView x, Backend& backend);
  // As Of, for an x of which every element will be written: a copy begins as zeros.
  static absl::StatusOr<ModeMatrix> ToFill(absl::Span<const int64_t> dims, size_t mode, MatrixView x, Backend& backend);

  From side() const { return side_; }
  MatrixView view() { return copy_.empty() ? view_ : copy_.view(); }
  // The tensor gets what the matrix has become.
  absl::Status WriteBack(Backend& backend);

 private:
  absl::Status Move(bool forth, Backend& backend);

  From side_ = From::kLeft;
  MatrixView view_;    // of a copied mode: [outer size, inner] of the tensor
  DeviceMatrix copy_;  // [size, outer inner]
  int64_t outer_ = 1;  // elements before the mode
};

}  // namespace precondor
