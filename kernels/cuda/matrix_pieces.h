// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime_api.h>

namespace precondor::cuda {

// Calls piece(row, rows, begin, bytes) for pieces of a matrix of `rows` rows of `width` bytes, each of at most
// `most_bytes`: whole rows, or bytes [begin, begin + bytes) of one row if a row has more. Stops after an error.
template <typename Piece>
cudaError_t ForEachPiece(int64_t most_bytes, int64_t width, int64_t rows, Piece piece) {
  const int64_t part = std::min(width, most_bytes);
  const int64_t together = std::max<int64_t>(1, most_bytes / std::max<int64_t>(part, 1));
  for (int64_t row = 0; row < rows; row += together) {
    for (int64_t begin = 0; begin < width; begin += part) {
      const cudaError_t error = piece(row, std::min(together, rows - row), begin, std::min(part, width - begin));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace precondor::cuda
