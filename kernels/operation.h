// SPDX-License-Identifier: Apache-2.0
// Backend's operations as data. Each operation is described once, in kernels/primitive_operations.h or
// kernels/composite_operations.h. Code that handles all of them (backends, the grouping of several layers' work, the
// check whether operations may be reordered) uses these descriptions.
//
// Backend's function with the name of an operation documents its effect, shapes and errors, and makes the operation
// after it has checked the operands. The maker of an operation owns its matrices and numbers. Outputs are never empty.
//
// An operation describes itself by:
//   static auto Reads(self)    ties of its matrices on the device; written ones may also be read
//   static auto Writes(self)
//   static auto Takes(self)    ties of its numbers from the host, which are copied if the operation is deferred
//   Awaited awaited() const    what its caller waits for; absent, as the ties are, if there is nothing
//   kIsComposite               true if Backend::RunByPrimitives can make it from other operations
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <variant>

#include "kernels/composite_operations.h"
#include "kernels/primitive_operations.h"

namespace precondor {

// Calls visitor.Reads(view...), visitor.Writes(view...) and visitor.Takes(span...) with what an operation ties.
void Describe(auto& kind, auto& visitor) {
  using Kind = std::remove_reference_t<decltype(kind)>;
  const auto takes = [&](auto&... all) { visitor.Takes(all...); };
  const auto reads = [&](auto&... all) { visitor.Reads(all...); };
  const auto writes = [&](auto&... all) { visitor.Writes(all...); };
  if constexpr (requires { Kind::Takes(kind); }) std::apply(takes, Kind::Takes(kind));
  if constexpr (requires { Kind::Reads(kind); }) std::apply(reads, Kind::Reads(kind));
  if constexpr (requires { Kind::Writes(kind); }) std::apply(writes, Kind::Writes(kind));
}

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
