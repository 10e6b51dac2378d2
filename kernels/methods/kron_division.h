// SPDX-License-Identifier: Apache-2.0
// How method kron divides a layer's gradient: its sides, and the tiles that have their own factors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/kron_block.h"
#include "kernels/methods/kron_config.h"

namespace precondor {

// A box of the gradient: its first index in each dimension, and its sides.
struct KronTile {
  std::vector<int64_t> first;
  KronSides sides;
};

// The sides and tiles of a gradient. Plain values; immutable after construction.
struct KronDivision {
  KronDivision(const KronConfig& config, const LayerSpec& layer);

  KronSides sides;              // of the whole gradient; either all tiles of a side are diagonal or none is
  std::vector<KronTile> tiles;  // row-major
  // Whether the sides are d_out and d_in, so that a tile is a rectangle of the gradient [d_out, d_in]. Otherwise the
  // gradient must be contiguous.
  bool is_matrix = true;

  // Returns the tile's rectangle in the gradient x. Precondition: is_matrix.
  static MatrixView Rectangle(const KronTile& tile, MatrixView x);
  // Copies the tile's elements out of the gradient x, or into it. `part` is contiguous and has tile.sides.elements()
  // elements.
  absl::Status CopyOut(const KronTile& tile, MatrixView x, MatrixView part, Backend& backend) const;
  absl::Status CopyIn(const KronTile& tile, MatrixView part, MatrixView x, Backend& backend) const;

  // Returns a text such as "64 576d": sizes, and "d" for a diagonal side.
  std::string Text() const;

 private:
  absl::Status Move(const KronTile& tile, bool out, MatrixView x, MatrixView part, Backend& backend) const;
};

}  // namespace precondor
