// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/operands.h"

#include <algorithm>
#include <cstdint>
#include <variant>

#include "absl/container/inlined_vector.h"

namespace precondor {
namespace {

using Views = absl::InlinedVector<ConstMatrixView, 7>;

struct Operands {
  Views read;
  Views written;  // and perhaps read
};

Operands Of(const operation::Elementwise& e) { return {{e.x}, {e.y}}; }
Operands Of(const operation::Gemm& g) { return {{g.a, g.b}, {g.c}}; }
Operands Of(const operation::SymmetricUpdateMultiply& s) { return {{s.rows, s.v}, {s.raw, s.y}}; }
Operands Of(const operation::RowSquaredNorms& n) { return {{n.x}, {}}; }
Operands Of(const operation::Dot& d) { return {{d.x, d.y}, {}}; }
Operands Of(const operation::SpdInverse& s) { return {{s.a}, {s.x}}; }
Operands Of(const operation::ColumnSquaredNorms& n) { return {{n.x}, {}}; }
Operands Of(const operation::SymmetricEigen& e) { return {{e.a}, {e.q}}; }
Operands Of(const operation::LowRankCore& c) { return {{c.gram}, {c.core, c.packed}}; }
Operands Of(const operation::LowRankAppend& a) { return {{a.rows}, {a.vectors, a.gram}}; }
Operands Of(const operation::LowRankPrecondition& p) {
  return {{p.d, p.out_side.vectors, p.out_side.core, p.in_side.vectors, p.in_side.core}, {p.u}};
}
Operands Of(const operation::DensePrecondition& p) {
  return {{p.d, p.l.matrix, p.l.raw, p.l.rows, p.r.matrix, p.r.raw, p.r.rows}, {p.u}};
}
Operands Of(const operation::ShermanMorrisonTerms& t) { return {{t.h.rows, t.v}, {t.y, t.terms}}; }

bool Overlap(ConstMatrixView x, ConstMatrixView y) {
  if (x.size() == 0 || y.size() == 0) return false;
  const auto begin = [](ConstMatrixView v) { return reinterpret_cast<intptr_t>(v.data); };
  const auto end = [](ConstMatrixView v) { return reinterpret_cast<intptr_t>(v.row(v.rows - 1) + v.cols); };
  if (end(x) <= begin(y) || end(y) <= begin(x)) return false;
  if (x.stride != y.stride) return true;
  // Columns of one matrix beside each other.
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
  return std::visit([](const auto& what) { return Of(what); }, operation.what);
}

}  // namespace

bool AreIndependent(const Operation& one, const Operation& other) {
  const Operands a = OperandsOf(one), b = OperandsOf(other);
  return !AnyOverlap(a.written, b.read) && !AnyOverlap(a.written, b.written) && !AnyOverlap(a.read, b.written);
}

}  // namespace precondor
