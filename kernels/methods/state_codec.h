// SPDX-License-Identifier: Apache-2.0
// The byte format of a LayerState: self-describing, versioned, equal on every machine, and checked before it is used.
//   "PCDRSTAT", u32 format, then what the method writes, then a u64 checksum over all before it. Numbers are
//   little-endian; text and matrices carry their sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/backend.h"

namespace precondor {

// Writes one state. Use it once, on one thread.
class StateWriter {
 public:
  // `expected_bytes` is an estimate of the final size; it avoids reallocations.
  explicit StateWriter(absl::string_view method, size_t expected_bytes = 0);
  void Integer(uint64_t value);
  void Number(double value);  // bit for bit
  void Text(absl::string_view text);
  void Numbers(const std::vector<double>& values);
  // Downloads the matrix, in parts that fit a core's cache, and appends it. Errors: the backend's.
  absl::Status Matrix(Backend& backend, ConstMatrixView matrix);
  // Append a matrix whose rows are in several places: call BeginMatrix, then Rows for each part in order.
  void BeginMatrix(int64_t rows, int64_t cols);
  absl::Status Rows(Backend& backend, ConstMatrixView rows);
  // Returns the bytes with their checksum, and leaves the writer empty.
  std::string Finish();

 private:
  std::string bytes_;
  std::vector<float> part_;  // of a matrix
};

// Reads one state. Use it once, on one thread; `bytes` must outlive it. Each error names the field. DataLoss: the bytes
// are damaged or cut short. FailedPrecondition: the bytes are intact but describe something else; the message has the
// expected and the actual value.
class StateReader {
 public:
  explicit StateReader(absl::string_view bytes) : bytes_(bytes) {}
  // Checks checksum, format and method. Call it first.
  absl::Status Begin(absl::string_view method);
  absl::StatusOr<uint64_t> Integer(absl::string_view field);
  absl::StatusOr<double> Number(absl::string_view field);
  absl::StatusOr<std::vector<double>> Numbers(absl::string_view field);
  absl::StatusOr<std::string> Text(absl::string_view field);
  absl::Status ExpectInteger(absl::string_view field, uint64_t expected);
  absl::Status ExpectText(absl::string_view field, absl::string_view expected);
  // Uploads a matrix to `out`, which must have its shape.
  absl::Status Matrix(absl::string_view field, Backend& backend, MatrixView out);
  // Returns a matrix' floats in place, without any alignment.
  absl::StatusOr<absl::string_view> MatrixBytes(absl::string_view field, int64_t rows, int64_t cols);
  // Checks that no bytes are left over. Call it last.
  absl::Status Finish() const;

 private:
  absl::StatusOr<absl::string_view> Take(absl::string_view field, uint64_t count);

  absl::string_view bytes_;
};

// Appends to `bytes` the checksum that StateReader expects at the end.
std::string WithChecksum(std::string bytes);
// Returns the checksum in bytes that StateWriter has made. States that are equal bit for bit have equal checksums.
uint64_t SavedChecksum(absl::string_view bytes);

}  // namespace precondor
