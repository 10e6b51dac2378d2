// SPDX-License-Identifier: Apache-2.0
// Backend's operation OrthogonalIteration: its checks, and its default by primitives.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status Backend::OrthogonalIteration(ConstMatrixView a, ConstMatrixView q, MatrixView next,
                                          absl::Span<int64_t> order) {
  const int64_t n = q.rows;
  for (const auto& [name, x] : {std::pair("a", a), std::pair("q", q), std::pair("next", ConstMatrixView(next))}) {
    if (x.rows == n && x.cols == n && x.stride >= n && (x.data != nullptr || n == 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("OrthogonalIteration: ", name, ": expected [", n, ", ", n, "], got [", x.rows, ", ", x.cols, "]"));
  }
  if (static_cast<int64_t>(order.size()) != n) {
    return absl::InvalidArgumentError(
        absl::StrCat("OrthogonalIteration: order: expected ", n, " elements, got ", order.size()));
  }
  return n == 0 ? absl::OkStatus() : Run({operation::OrthogonalIteration{a, q, next, order}});
}

absl::Status Backend::RunByPrimitives(const operation::OrthogonalIteration& step) {
  const int64_t n = step.q.rows;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix product, AllocateScratch(n, n));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, step.q, Transpose::kNo, step.a, Transpose::kNo, 0.0, product.view()));
  PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, product.view(), Transpose::kNo, step.q, Transpose::kYes, 0.0, step.next));
  std::vector<double> values(n);
  PRECONDOR_RETURN_IF_ERROR(Diagonal(step.next, absl::MakeSpan(values)));
  for (const double value : values) {
    if (!std::isfinite(value))
      return absl::FailedPreconditionError("OrthogonalIteration: a: expected a finite product");
  }
  std::iota(step.order.begin(), step.order.end(), int64_t{0});
  std::stable_sort(step.order.begin(), step.order.end(), [&](int64_t i, int64_t j) { return values[i] > values[j]; });
  PRECONDOR_RETURN_IF_ERROR(Gather(step.order, {}, product.view(), step.next));
  return OrthonormalizeRows(step.next, step.next);
}

}  // namespace precondor
