// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/tensor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/methods/options.h"

namespace precondor {
namespace {

double Penalty(double d, double target) {
  const auto beyond = [](double ratio) { return ratio > 1 ? std::log2(ratio) : 0.0; };
  if (d < target) return std::log2(target / d) + 100 * beyond(target / 8 / d);
  return 10 * std::log2(d / target) + 1000 * beyond(d / (8 * target));
}

// Groups dims. Bit n - 2 - i of `cuts` says that dims[i] is the last of its group.
std::vector<int64_t> Grouped(absl::Span<const int64_t> dims, uint32_t cuts) {
  std::vector<int64_t> groups = {dims[0]};
  for (size_t i = 1; i < dims.size(); ++i) {
    if ((cuts >> (dims.size() - 1 - i)) & 1) {
      groups.push_back(dims[i]);
    } else {
      groups.back() *= dims[i];
    }
  }
  return groups;
}

}  // namespace

int64_t ElementsOf(absl::Span<const int64_t> dims) {
  int64_t elements = 1;
  for (const int64_t d : dims) elements *= d;
  return elements;
}

std::vector<int64_t> MergeSmallDims(absl::Span<const int64_t> dims, int64_t target, int64_t longest) {
  constexpr double kSame = 1e-9;  // penalties that differ only by rounding
  std::vector<int64_t> whole;     // dimensions greater than 1
  for (const int64_t d : dims) {
    if (d > 1) whole.push_back(d);
  }
  if (whole.empty()) return {1};
  std::vector<int64_t> best = whole;
  double least = std::numeric_limits<double>::infinity();
  for (uint32_t cuts = uint32_t{1} << (whole.size() - 1); cuts-- > 0;) {
    const std::vector<int64_t> groups = Grouped(whole, cuts);
    double penalty = 0;
    size_t at = 0;
    for (const int64_t group : groups) {
      const bool merged = group != whole[at];
      for (int64_t product = 1; product < group;) product *= whole[at++];
      penalty += merged && group > longest ? std::numeric_limits<double>::infinity()
                                           : Penalty(static_cast<double>(group), static_cast<double>(target));
    }
    if (penalty < least - kSame) {
      least = penalty;
      best = groups;
    }
  }
  return best;
}

DimMerging DimMerging::Read(OptionReader& reader) {
  DimMerging out;
  out.merge_small_dims = reader.Flag("merge_small_dims", out.merge_small_dims);
  out.target_merged_dim_size = reader.Integer("target_merged_dim_size", out.target_merged_dim_size, 1, kMaxDimension);
  return out;
}

std::vector<int64_t> DimMerging::Sides(const LayerSpec& layer, int64_t longest) const {
  const std::vector<int64_t> dims = TensorDims(layer);
  return merge_small_dims && dims.size() > 2 ? MergeSmallDims(dims, target_merged_dim_size, longest) : dims;
}

absl::StatusOr<ModeMatrix> ModeMatrix::Of(absl::Span<const int64_t> dims, size_t mode, MatrixView x, Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix out, ToFill(dims, mode, x, backend));
  if (!out.copy_.empty()) PRECONDOR_RETURN_IF_ERROR(out.Move(true, backend));
  return out;
}

absl::StatusOr<ModeMatrix> ModeMatrix::ToFill(absl::Span<const int64_t> dims, size_t mode, MatrixView x,
                                              Backend& backend) {
  ModeMatrix out;
  if (dims.size() == 2) {
    out.side_ = From(mode == 1);
    out.view_ = x;
    return out;
  }
  const int64_t size = dims[mode], outer = ElementsOf(dims.first(mode)), inner = ElementsOf(dims.subspan(mode + 1));
  if (inner == 1) {
    out.side_ = From::kRight;
    out.view_ = MatrixView(x.data, outer, size);
    return out;
  }
  if (outer == 1) {
    out.view_ = MatrixView(x.data, size, inner);
    return out;
  }
  out.view_ = MatrixView(x.data, outer * size, inner);
  out.outer_ = outer;
  PRECONDOR_ASSIGN_OR_RETURN(out.copy_, backend.AllocateScratch(size, outer * inner));
  return out;
}

absl::Status ModeMatrix::WriteBack(Backend& backend) { return copy_.empty() ? absl::OkStatus() : Move(false, backend); }

// Element (o, s, i) of the tensor is element (s, o inner + i) of the copy. Copies matrices over (o, i) for each s, or
// over (s, i) for each o, whichever are fewer.
absl::Status ModeMatrix::Move(bool forth, Backend& backend) {
  const int64_t size = copy_.rows(), inner = view_.cols;
  const MatrixView copy = copy_.view();
  for (int64_t at = 0; at < std::min(size, outer_); ++at) {
    const bool by_size = size <= outer_;
    const MatrixView tensor = by_size ? MatrixView(view_.row(at), outer_, inner, size * inner)
                                      : MatrixView(view_.row(at * size), size, inner, inner);
    const MatrixView matrix = by_size ? MatrixView(copy.row(at), outer_, inner, inner)
                                      : MatrixView(copy.data + at * inner, size, inner, outer_ * inner);
    PRECONDOR_RETURN_IF_ERROR(forth ? backend.Copy(tensor, matrix) : backend.Copy(matrix, tensor));
  }
  return absl::OkStatus();
}

}  // namespace precondor
