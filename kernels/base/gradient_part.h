// SPDX-License-Identifier: Apache-2.0
// The parts of a gradient that ranks have in exchange SHARDED (docs/develop/protocol.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// A rectangle of a layer's gradient [d_out, d_in] that a rank has. The rectangles with `sent` of all ranks contain each
// element exactly once. The elements of several parts follow each other, each part row by row.
struct GradientPart {
  int64_t row = 0, rows = 0;
  int64_t col = 0, cols = 0;
  bool sent = true;  // false: another rank sends it, and this rank only receives its answer
  int64_t size() const { return rows * cols; }
  bool operator==(const GradientPart&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const GradientPart& part) {
    return H::combine(std::move(h), part.row, part.rows, part.col, part.cols, part.sent);
  }
};

// Returns whether the part has elements and is within the layer's gradient.
inline bool IsWithin(const GradientPart& part, const LayerSpec& layer) {
  return part.row >= 0 && part.rows >= 1 && part.row + part.rows <= layer.d_out && part.col >= 0 && part.cols >= 1 &&
         part.col + part.cols <= layer.d_in;
}

// Greatest number of parts of one rank and layer.
inline constexpr size_t kMaxGradientParts = 64;

inline int64_t SentElements(absl::Span<const GradientPart> parts) {
  int64_t elements = 0;
  for (const GradientPart& part : parts) elements += part.sent ? part.size() : 0;
  return elements;
}

inline int64_t ReceivedElements(absl::Span<const GradientPart> parts) {
  int64_t elements = 0;
  for (const GradientPart& part : parts) elements += part.size();
  return elements;
}

}  // namespace precondor
