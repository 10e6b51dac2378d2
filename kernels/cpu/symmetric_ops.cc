// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/symmetric_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/symmetric_tiles.h"

namespace precondor::tiles {
namespace {

// Makes both panels of the terms, the left ones first. Each row is scaled by the root of its weight, so that left and
// right differ only by a sign and the tiles on the diagonal stay symmetric to the bit.
absl::StatusOr<DeviceMatrix> MakePanels(Backend& backend, absl::Span<const double> weights, ConstMatrixView rows) {
  const int64_t count = rows.rows, tiles = TileRows(rows.cols);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, backend.Allocate(2 * tiles * count, kTileSide));
  for (int64_t i = 0; i < count; ++i) {
    const float root = static_cast<float>(std::sqrt(std::fabs(weights[i])));
    const float sign = weights[i] < 0 ? -1.0f : 1.0f;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float* left = panels.view().row(tile * count + i);
      float* right = panels.view().row((tiles + tile) * count + i);
      const float* from = rows.row(i) + tile * kTileSide;
      for (int64_t j = 0; j < TileHeight(rows.cols, tile); ++j) {
        right[j] = root * from[j];
        left[j] = sign * right[j];
      }
    }
  }
  return panels;
}

Terms TermsOf(const DeviceMatrix& panels, int64_t count) {
  if (count == 0) return {};
  return {panels.view().data, panels.view().row(panels.rows() / 2), count};
}

// Whether `data` has the alignment that the kernels' loads need.
bool IsAligned(const float* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

}  // namespace

absl::Status Run(Backend& backend, const operation::SymmetricUpdateMultiply& update) {
  const ConstMatrixView rows = update.rows, v = update.v;
  const MatrixView y = update.y;
  const int64_t n = update.n, length = PaddedLength(n), count = v.rows;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, MakePanels(backend, update.weights, rows));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scratch, backend.Allocate(1, MultiplyScratch(n, count)));
  const Terms terms = TermsOf(panels, rows.rows);
  const auto run = [&](const float* in, float* out) {
    UpdateMultiply(static_cast<float>(update.scale), update.shift, terms, {update.raw.data, n, update.storage}, in,
                   count, out, scratch.view().data);
  };
  if (count <= 1 && n == length && IsAligned(v.data) && IsAligned(y.data)) {
    run(v.data, y.data);
    return absl::OkStatus();
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix padded, backend.Allocate(2 * count, length));
  const MatrixView in = padded.view().RowRange(0, count), out = padded.view().RowRange(count, count);
  for (int64_t k = 0; k < count; ++k) std::copy_n(v.row(k), n, in.row(k));
  run(in.data, out.data);
  for (int64_t k = 0; k < count; ++k) std::copy_n(out.row(k), n, y.row(k));
  return absl::OkStatus();
}

absl::Status Run(Backend& backend, const operation::SymmetricExpand& expand) {
  const SymmetricForm& form = expand.form;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, MakePanels(backend, form.weights, form.rows));
  Expand(static_cast<float>(form.scale), form.shift, TermsOf(panels, form.rows.rows), form.raw.data, form.n,
         form.storage, expand.x);
  return absl::OkStatus();
}

}  // namespace precondor::tiles
