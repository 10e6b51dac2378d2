// SPDX-License-Identifier: Apache-2.0
// Tensors of several dimensions as matrices, for methods with a factor for each dimension. A tensor is a row-major
// sequence of elements. A product along one of its dimensions (its mode) is a matrix product.
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

// Returns `dims` with neighbours merged so that the products are nearest to `target`, by the penalty of
// `distributed_kron`'s _merge_small_dims: log2(target / d) below the target, plus 100 log2(target / (8 d)) below an
// eighth of it; 10 log2(d / target) above the target, plus 1000 log2(d / (8 target)) above eight times it. Among
// equals, the one with the shortest first group. Dimensions of 1 merge with any neighbour. Unlike in that source, no
// product of several dimensions exceeds `longest`. Precondition: target >= 1; `dims` is not empty, and all its elements
// are positive.
std::vector<int64_t> MergeSmallDims(absl::Span<const int64_t> dims, int64_t target, int64_t longest);

// How a layer's dimensions become sides that have factors, by the options of these names.
struct DimMerging {
  bool merge_small_dims = true;
  int64_t target_merged_dim_size = 256;

  static DimMerging Read(OptionReader& reader);
  // Returns the layer's dimensions, merged if there are more than two.
  std::vector<int64_t> Sides(const LayerSpec& layer, int64_t longest) const;
};

// One mode of a tensor as a matrix, [d, the rest] (side() == From::kLeft) or [the rest, d] (kRight): a product along
// the mode multiplies from that side, and that side's Gram matrix is the mode's. For the first and the last mode it is
// a view into the tensor; for a mode between others it is a copy, which WriteBack copies back. One thread.
class ModeMatrix {
 public:
  // Makes the matrix of one mode. With two dimensions, x is [dims[0], dims[1]] of any stride. Otherwise x is
  // contiguous, and its rows and columns have no meaning. x must outlive the result. Scratch: x's elements for a mode
  // between others.
  static absl::StatusOr<ModeMatrix> Of(absl::Span<const int64_t> dims, size_t mode, MatrixView x, Backend& backend);
  // Makes the matrix of one mode for an x whose every element will be written: the contents of a copy are unspecified.
  // Otherwise like Of.
  static absl::StatusOr<ModeMatrix> ToFill(absl::Span<const int64_t> dims, size_t mode, MatrixView x, Backend& backend);

  From side() const { return side_; }
  MatrixView view() { return copy_.empty() ? view_ : copy_.view(); }
  // Copies the matrix back to the tensor if it is a copy.
  absl::Status WriteBack(Backend& backend);

 private:
  absl::Status Move(bool forth, Backend& backend);

  From side_ = From::kLeft;
  MatrixView view_;    // if copied: the tensor as [outer size, inner]
  DeviceMatrix copy_;  // [size, outer inner]
  int64_t outer_ = 1;  // elements before the mode
};

}  // namespace precondor
