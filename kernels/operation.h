// SPDX-License-Identifier: Apache-2.0
// Backend's operations as data: each is described once, in kernels/primitive_operations.h or
// kernels/composite_operations.h, and everything that has to know all of them (backends, the grouping of several
// layers' work, what may change places) goes by these descriptions.
//
// What an operation does, its shapes and its errors: Backend's function of the same name, which makes it once its
// operands are checked. Matrices and numbers belong to the maker of the operation, and its outputs have elements.
//
// An operation says of itself:
//   static void Describe(self, visitor)   visitor.Reads(view...) and visitor.Writes(view...), which may also be read,
//                                         for every matrix on the device; visitor.Takes(span...) for numbers that the
//                                         host gives, kept where the operation runs later than the call
//   Awaited awaited() const               what its caller waits for, where it does wait
//   kIsComposite                          that Backend::RunByPrimitives can make it of other operations
#pragma once

#include <cstddef>
#include <variant>

#include "kernels/composite_operations.h"
#include "kernels/primitive_operations.h"

namespace precondor {

struct Operation {
  std::variant<operation::Elementwise, operation::MultiplyElements, operation::DivideByRoot, operation::DivideByOuter,
               operation::Gather, operation::FillNormal, operation::Dot, operation::AbsoluteSum,
               operation::AbsoluteMaximum, operation::Diagonal, operation::RowSquaredNorms,
               operation::ColumnSquaredNorms, operation::Gemm, operation::TriangularMultiply,
               operation::TriangularSolve, operation::SpdInverse, operation::SymmetricEigen,
               operation::OrthonormalizeRows, operation::SymmetricUpdateMultiply, operation::SymmetricExpand,
               operation::SymmetricCompress, operation::LowRankCore, operation::LowRankAppend,
               operation::LowRankPrecondition, operation::DensePrecondition, operation::ShermanMorrisonTerms>
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
