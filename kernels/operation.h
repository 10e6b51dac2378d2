// SPDX-License-Identifier: Apache-2.0
// Backend's operations as data. Each operation is described once, in kernels/primitive_operations.h or
// kernels/composite_operations.h. Code that handles all of them (backends, the grouping of several layers' work, the
// check whether operations may be reordered) uses these descriptions.
//
// Backend's function with the name of an operation documents its effect, shapes and errors, and makes the operation
// after it has checked the operands. The maker of an operation owns its matrices and numbers. Outputs are never empty.
//
// An operation describes itself by:
//   static void Describe(self, visitor)   calls visitor.Reads(view...) and visitor.Writes(view...) for every matrix on
//                                         the device (a written one may also be read), and visitor.Takes(span...) for
//                                         numbers from the host, which are copied if the operation is deferred
//   Awaited awaited() const               what its caller waits for; absent if the caller waits for nothing
//   kIsComposite                          true if Backend::RunByPrimitives can make it from other operations
#pragma once

#include <cstddef>
#include <variant>

#include "kernels/composite_operations.h"
#include "kernels/primitive_operations.h"

namespace precondor {

struct Operation {
  std::variant<
      operation::Elementwise, operation::FillNormal, operation::Dot, operation::AbsoluteSum, operation::AbsoluteMaximum,
      operation::Diagonal, operation::RowSquaredNorms, operation::ColumnSquaredNorms, operation::Gemm,
      operation::TriangularMultiply, operation::TriangularSolve, operation::SpdInverse, operation::SymmetricEigen,
      operation::OrthonormalizeRows, operation::SymmetricUpdateMultiply, operation::SymmetricExpand,
      operation::LowRankCore, operation::LowRankAppend, operation::LowRankPrecondition, operation::DensePrecondition,
      operation::NewtonSchulz, operation::OrthogonalIteration, operation::ShermanMorrisonTerms>
      what;

  size_t kind() const { return what.index(); }
  template <typename Kind>
  const Kind* As() const {
    return std::get_if<Kind>(&what);
  }
  Awaited awaited() const {
    return std::visit(
        [](const auto& kind) {
          if constexpr (requires { kind.awaited(); }) return kind.awaited();
          return Awaited::kNothing;
        },
        what);
  }
};

}  // namespace precondor
