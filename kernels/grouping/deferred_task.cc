// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/deferred_task.h"

#include <algorithm>
#include <cstdint>
#include <variant>

#include "absl/container/inlined_vector.h"

namespace precondor {
namespace {

using Views = absl::InlinedVector<ConstMatrixView, 7>;

// Operands of an operation, collected from its description.
struct Operands {
  Views read;
  Views written;  // possibly also read

  void Reads(const auto&... views) { (read.push_back(views), ...); }
  void Writes(const auto&... views) { (written.push_back(views), ...); }
  void Takes(const auto&...) {}
};

bool Overlap(ConstMatrixView x, ConstMatrixView y) {
  if (x.size() == 0 || y.size() == 0) return false;
  const auto begin = [](ConstMatrixView v) { return reinterpret_cast<intptr_t>(v.data); };
  const auto end = [](ConstMatrixView v) { return reinterpret_cast<intptr_t>(v.row(v.rows - 1) + v.cols); };
  if (end(x) <= begin(y) || end(y) <= begin(x)) return false;
  if (x.stride != y.stride) return true;
  // With equal strides, the views may be disjoint columns of one matrix.
  const int64_t stride = x.stride, apart = (begin(y) - begin(x)) / static_cast<int64_t>(sizeof(float));
  const int64_t column = (apart % stride + stride) % stride;
  return column < x.cols || column + y.cols > stride;
}

bool AnyOverlap(const Views& some, const Views& others) {
  return std::any_of(some.begin(), some.end(), [&](ConstMatrixView x) {
    return std::any_of(others.begin(), others.end(), [&](ConstMatrixView y) { return Overlap(x, y); });
  });
}

Operands OperandsOf(const Operation& operation) {
  Operands operands;
  std::visit([&operands](const auto& kind) { Describe(kind, operands); }, operation.what);
  return operands;
}

}  // namespace

bool AreIndependent(const Operation& one, const Operation& other) {
  const Operands a = OperandsOf(one), b = OperandsOf(other);
  return !AnyOverlap(a.written, b.read) && !AnyOverlap(a.written, b.written) && !AnyOverlap(a.read, b.written);
}

}  // namespace precondor
