// SPDX-License-Identifier: Apache-2.0
// Backend's operation NewtonSchulz: its checks, and its default by primitives.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status Backend::NewtonSchulz(const operation::NewtonSchulz& step) {
  const bool has_momentum = step.momentum.size() > 0;
  const std::array<std::pair<const char*, ConstMatrixView>, 5> operands = {
      {{"d", step.d}, {"u", step.u}, {"momentum", step.momentum}, {"next", step.next}, {"lookahead", step.lookahead}}};
  for (const auto& [name, x] : operands) {
    const bool absent = x.size() == 0 && (name == operands[2].first || name == operands[4].first || !has_momentum);
    const bool fits = x.rows == step.d.rows && x.cols == step.d.cols && x.stride >= x.cols && x.data != nullptr;
    if (absent || fits) continue;
    return absl::InvalidArgumentError(absl::StrCat("NewtonSchulz: ", name, ": expected [", step.d.rows, ", ",
                                                   step.d.cols, "], got [", x.rows, ", ", x.cols, "]"));
  }
  if (step.squares.size() != 3 || step.steps < 1 || (!has_momentum && step.next.size() + step.lookahead.size() > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("NewtonSchulz: expected 3 squares, a step or more, and outputs of a momentum only with one, got ",
                     step.squares.size(), " squares and ", step.steps, " steps"));
  }
  return step.u.size() == 0 ? absl::OkStatus() : Run({step});
}

// x and y alternate as input and output of an iteration, and the last one writes u. If d is tall, the polynomial of x'x
// multiplies from the right: the transpose of the published one from the left.
absl::Status Backend::RunByPrimitives(const operation::NewtonSchulz& step) {
  ConstMatrixView direction = step.d;
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[0], Dot(step.d, step.d));
  if (step.momentum.size() > 0) {
    if (!std::isfinite(step.squares[0])) return absl::OkStatus();
    PRECONDOR_RETURN_IF_ERROR(Copy(step.momentum, step.next));
    PRECONDOR_RETURN_IF_ERROR(Axpby(1.0, step.d, step.beta, step.next));
    direction = step.next;
    if (step.lookahead.size() > 0) {
      PRECONDOR_RETURN_IF_ERROR(Copy(step.d, step.lookahead));
      PRECONDOR_RETURN_IF_ERROR(Axpby(step.beta, step.next, 1.0, step.lookahead));
      direction = step.lookahead;
    }
  }
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[1], Dot(direction, direction));
  if (!std::isfinite(step.squares[1])) return absl::OkStatus();
  step.squares[2] = 0;
  if (step.squares[1] == 0) return Axpby(0.0, step.u, 0.0, step.u);
  const int64_t m = step.d.rows, n = step.d.cols, k = std::min(m, n);
  const bool wide = m <= n;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix other, AllocateScratch(m, n));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix gram, AllocateScratch(k, k));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix polynomial, AllocateScratch(k, k));
  MatrixView x = step.u, y = other.view();
  const MatrixView a = gram.view(), p = polynomial.view();
  if (step.steps % 2 != 0) std::swap(x, y);
  PRECONDOR_RETURN_IF_ERROR(Copy(direction, x));
  PRECONDOR_RETURN_IF_ERROR(ScaleBy(1 / (std::sqrt(step.squares[1]) + step.epsilon), x));
  for (int64_t i = 1; i <= step.steps; ++i) {
    const double scale = i == step.steps ? step.scale : 1.0;
    PRECONDOR_RETURN_IF_ERROR(Gemm(1.0, x, Transpose(!wide), x, Transpose(wide), 0.0, a));
    PRECONDOR_RETURN_IF_ERROR(Copy(a, p));
    PRECONDOR_RETURN_IF_ERROR(
        Gemm(operation::kNewtonSchulzQuintic, a, Transpose::kNo, a, Transpose::kNo, operation::kNewtonSchulzCubic, p));
    PRECONDOR_RETURN_IF_ERROR(AddDiagonal(operation::kNewtonSchulzLinear, p));
    PRECONDOR_RETURN_IF_ERROR(wide ? Gemm(scale, p, Transpose::kNo, x, Transpose::kNo, 0.0, y)
                                   : Gemm(scale, x, Transpose::kNo, p, Transpose::kNo, 0.0, y));
    std::swap(x, y);
  }
  PRECONDOR_ASSIGN_OR_RETURN(step.squares[2], Dot(step.u, step.u));
  return absl::OkStatus();
}

}  // namespace precondor
