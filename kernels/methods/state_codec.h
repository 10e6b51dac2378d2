// SPDX-License-Identifier: Apache-2.0
// Bytes of a LayerState: self-describing, versioned, the same on every machine, checked before anything is believed.
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

// One use, one thread.
class StateWriter {
 public:
  // `expected_bytes`: about as many as will come, so that they need not move as they become more.
  explicit StateWriter(absl::string_view method, size_t expected_bytes = 0);
  void Integer(uint64_t value);
  void Number(double value);  // bit for bit
  void Text(absl::string_view text);
  void Numbers(const std::vector<double>& values);
  // Downloads it, in parts that stay in a core's cache until they are taken over. Errors: the backend's.
  absl::Status Matrix(Backend& backend, ConstMatrixView matrix);
  // The same of a matrix whose rows are in several places, one after the other.
  void BeginMatrix(int64_t rows, int64_t cols);
  absl::Status Rows(Backend& backend, ConstMatrixView rows);
  // The bytes, with their checksum; the writer is empty afterwards.
  std::string Finish();

 private:
  std::string bytes_;
  std::vector<float> part_;  // of a matrix
};

// One use, one thread; `bytes` outlives it. Each error names the field. DataLoss: the bytes are damaged or cut short.
// FailedPrecondition: they are whole and describe something else; with expected and got.
class StateReader {
 public:
  explicit StateReader(absl::string_view bytes) : bytes_(bytes) {}
  // First of all: checksum, format and method.
  absl::Status Begin(absl::string_view method);
  absl::StatusOr<uint64_t> Integer(absl::string_view field);
  absl::StatusOr<double> Number(absl::string_view field);
  absl::StatusOr<std::vector<double>> Numbers(absl::string_view field);
  absl::StatusOr<std::string> Text(absl::string_view field);
  absl::Status ExpectInteger(absl::string_view field, uint64_t expected);
  absl::Status ExpectText(absl::string_view field, absl::string_view expected);
  // Uploads to `out`, whose shape it has to have.
  absl::Status Matrix(absl::string_view field, Backend& backend, MatrixView out);
  // Its floats as they lie, aligned to nothing.
  absl::StatusOr<absl::string_view> MatrixBytes(absl::string_view field, int64_t rows, int64_t cols);
  // Last of all: nothing is left over.
  absl::Status Finish() const;

 private:
  absl::StatusOr<absl::string_view> Take(absl::string_view field, uint64_t count);

  absl::string_view bytes_;
};

// `bytes`, which have none, with the checksum that StateReader looks for at their end.
std::string WithChecksum(std::string bytes);
// The checksum in bytes that StateWriter has made. Equal for states that are, bit for bit.
uint64_t SavedChecksum(absl::string_view bytes);

}  // namespace precondor
