// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kron_division.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

KronDivision::KronDivision(const KronConfig& config, const LayerSpec& layer) {
  sides.sizes = config.Sides(layer);
  sides.diagonal = config.Diagonal(sides.sizes, TensorDims(layer).size());
  is_matrix = sides.sizes == std::vector<int64_t>{layer.d_out, layer.d_in};
  tiles = {{.first = {}, .sides = {.sizes = {}, .diagonal = sides.diagonal}}};
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    std::vector<KronTile> longer;
    for (const KronTile& tile : tiles) {
      int64_t at = 0;
      for (const int64_t size : config.Blocks(sides.sizes[mode], sides.diagonal[mode])) {
        longer.push_back(tile);
        longer.back().first.push_back(at);
        longer.back().sides.sizes.push_back(size);
        at += size;
      }
    }
    tiles = std::move(longer);
  }
}

MatrixView KronDivision::Rectangle(const KronTile& tile, MatrixView x) {
  return MatrixView(x.row(tile.first[0]) + tile.first[1], tile.sides.sizes[0], tile.sides.sizes[1], x.stride);
}

absl::Status KronDivision::CopyOut(const KronTile& tile, MatrixView x, MatrixView part, Backend& backend) const {
  return Move(tile, true, x, part, backend);
}

absl::Status KronDivision::CopyIn(const KronTile& tile, MatrixView part, MatrixView x, Backend& backend) const {
  return Move(tile, false, x, part, backend);
}

// Copies the tile as a series of matrices. Their columns are the last side of which the tile is a part, together with
// all sides after it; their rows are the side before that. There is one matrix for each index in the earlier sides.
absl::Status KronDivision::Move(const KronTile& tile, bool out, MatrixView x, MatrixView part, Backend& backend) const {
  size_t last = sides.sizes.size() - 1;
  while (last > 0 && tile.sides.sizes[last] == sides.sizes[last]) --last;
  const absl::Span<const int64_t> whole = sides.sizes, own = tile.sides.sizes;
  const int64_t inner = ElementsOf(whole.subspan(last + 1)), cols = own[last] * inner;
  const int64_t stride = whole[last] * inner;
  const size_t before = last == 0 ? 0 : last - 1;  // sides over whose indices the loop runs
  const int64_t rows = last == 0 ? 1 : own[last - 1];
  const int64_t count = ElementsOf(own.first(before));
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = last == 0 ? 0 : tile.first[last - 1], scale = last == 0 ? 1 : whole[last - 1], rest = i;
    for (size_t mode = before; mode-- > 0; rest /= own[mode], scale *= whole[mode]) {
      place += (tile.first[mode] + rest % own[mode]) * scale;
    }
    const MatrixView there(x.data + place * stride + tile.first[last] * inner, rows, cols, stride);
    const MatrixView here(part.data + i * rows * cols, rows, cols);
    PRECONDOR_RETURN_IF_ERROR(out ? backend.Copy(there, here) : backend.Copy(here, there));
  }
  return absl::OkStatus();
}

std::string KronDivision::Text() const {
  std::string text;
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    absl::StrAppend(&text, mode > 0 ? " " : "", sides.sizes[mode], sides.diagonal[mode] ? "d" : "");
  }
  return text;
}

}  // namespace precondor
