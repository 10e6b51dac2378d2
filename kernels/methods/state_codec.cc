// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/state_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as the host has them");

constexpr absl::string_view kMagic = "PCDRSTAT";
constexpr uint32_t kFormat = 2;  // format 1 has one sum in its checksum
constexpr size_t kSums = 8;
constexpr size_t kShownText = 200;
constexpr int64_t kPartElements = int64_t{64} << 10;

// FNV-1a over words of 8 bytes, the last one padded with zeros, and the length. It detects faults of a disk and
// truncated copies. Words go to several sums in turn, because each step of one sum must wait for the multiplication
// before it.
template <size_t kSums>
uint64_t Checksum(absl::string_view bytes) {
  constexpr uint64_t kPrime = 0x100000001b3, kBasis = 0xcbf29ce484222325;
  uint64_t sums[kSums];
  std::fill(sums, sums + kSums, kBasis);
  const auto add = [](uint64_t& sum, uint64_t word) {
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 32;  // the low bits of a product do not depend on its high bits
  };
  absl::string_view left = bytes;
  for (; left.size() >= sizeof(sums); left.remove_prefix(sizeof(sums))) {
    uint64_t words[kSums];
    std::memcpy(words, left.data(), sizeof(words));
    for (size_t i = 0; i < kSums; ++i) add(sums[i], words[i]);
  }
  for (size_t i = 0; !left.empty(); ++i) {
    uint64_t word = 0;
    const size_t count = std::min(sizeof(word), left.size());
    std::memcpy(&word, left.data(), count);
    add(sums[i], word);
    left.remove_prefix(count);
  }
  for (size_t i = 1; i < kSums; ++i) add(sums[0], sums[i]);
  return (sums[0] ^ bytes.size()) * kPrime;
}

// Precondition: `format` is 1 ... kFormat.
uint64_t ChecksumOf(uint32_t format, absl::string_view bytes) {
  return format == 1 ? Checksum<1>(bytes) : Checksum<kSums>(bytes);
}

template <typename T>
void Put(std::string& out, T value) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.append(raw, sizeof(T));
}

template <typename T>
T Get(absl::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace

StateWriter::StateWriter(absl::string_view method, size_t expected_bytes) {
  constexpr size_t kFew = 4096;  // magic, sizes and scalars
  if (expected_bytes > 0) bytes_.reserve(expected_bytes + kFew);
  bytes_.append(kMagic.data(), kMagic.size());
  Put(bytes_, kFormat);
  Text(method);
}

void StateWriter::Integer(uint64_t value) { Put(bytes_, value); }
void StateWriter::Number(double value) { Put(bytes_, value); }

void StateWriter::Text(absl::string_view text) {
  Integer(text.size());
  bytes_.append(text.data(), text.size());
}

void StateWriter::Numbers(const std::vector<double>& values) {
  Integer(values.size());
  for (double value : values) Number(value);
}

absl::Status StateWriter::Matrix(Backend& backend, ConstMatrixView matrix) {
  BeginMatrix(matrix.rows, matrix.cols);
  return Rows(backend, matrix);
}

void StateWriter::BeginMatrix(int64_t rows, int64_t cols) {
  Integer(static_cast<uint64_t>(rows));
  Integer(static_cast<uint64_t>(cols));
}

absl::Status StateWriter::Rows(Backend& backend, ConstMatrixView matrix) {
  if (matrix.size() == 0) return absl::OkStatus();
  const int64_t most = std::max<int64_t>(kPartElements / matrix.cols, 1);
  part_.resize(std::max(part_.size(), static_cast<size_t>(std::min(most, matrix.rows) * matrix.cols)));
  for (int64_t row = 0; row < matrix.rows; row += most) {
    const ConstMatrixView rows = matrix.RowRange(row, std::min(most, matrix.rows - row));
    PRECONDOR_RETURN_IF_ERROR(backend.Download(rows, MatrixView(part_.data(), rows.rows, rows.cols)));
    bytes_.append(reinterpret_cast<const char*>(part_.data()), static_cast<size_t>(rows.size()) * sizeof(float));
  }
  return absl::OkStatus();
}

std::string StateWriter::Finish() { return WithChecksum(std::move(bytes_)); }

absl::StatusOr<absl::string_view> StateReader::Take(absl::string_view field, uint64_t count) {
  if (count > bytes_.size()) {
    return absl::DataLossError(
        absl::StrCat("layer state: ", field, ": expected ", count, " more bytes, got ", bytes_.size()));
  }
  const absl::string_view taken = bytes_.substr(0, count);
  bytes_.remove_prefix(count);
  return taken;
}

absl::Status StateReader::Begin(absl::string_view method) {
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view magic, Take("magic", kMagic.size()));
  if (magic != kMagic) return absl::DataLossError("layer state: magic: these are not the bytes of a layer's state");
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view format, Take("format", sizeof(kFormat)));
  const auto number = Get<uint32_t>(format);
  if (number < 1 || number > kFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer state: format: expected at most ", kFormat, ", got ", number));
  }
  if (bytes_.size() < sizeof(uint64_t)) return absl::DataLossError("layer state: checksum: missing");
  const size_t body = bytes_.size() - sizeof(uint64_t);
  const uint64_t stored = Get<uint64_t>(bytes_.substr(body));
  const absl::string_view all(magic.data(), kMagic.size() + sizeof(kFormat) + body);
  if (ChecksumOf(number, all) != stored) {
    return absl::DataLossError(
        absl::StrCat("layer state: checksum: does not match the ", all.size(), " bytes before it"));
  }
  bytes_ = bytes_.substr(0, body);
  return ExpectText("method", method);
}

absl::StatusOr<uint64_t> StateReader::Integer(absl::string_view field) {
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view bytes, Take(field, sizeof(uint64_t)));
  return Get<uint64_t>(bytes);
}

absl::StatusOr<double> StateReader::Number(absl::string_view field) {
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view bytes, Take(field, sizeof(double)));
  return Get<double>(bytes);
}

absl::StatusOr<std::vector<double>> StateReader::Numbers(absl::string_view field) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t count, Integer(field));
  if (count > bytes_.size() / sizeof(double)) {
    return absl::DataLossError(
        absl::StrCat("layer state: ", field, ": expected ", count, " numbers, got ", bytes_.size(), " bytes"));
  }
  std::vector<double> values;
  values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) values.push_back(Number(field).value());
  return values;
}

absl::Status StateReader::ExpectInteger(absl::string_view field, uint64_t expected) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t got, Integer(field));
  if (got == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("layer state: ", field, ": expected ", expected, ", got ", got));
}

absl::StatusOr<std::string> StateReader::Text(absl::string_view field) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t size, Integer(field));
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view text, Take(field, size));
  return std::string(text);
}

absl::Status StateReader::ExpectText(absl::string_view field, absl::string_view expected) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string got, Text(field));
  if (got == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("layer state: ", field, ": expected \"", expected, "\", got \"",
                                                    absl::string_view(got).substr(0, kShownText), "\""));
}

absl::Status StateReader::Matrix(absl::string_view field, Backend& backend, MatrixView out) {
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view bytes, MatrixBytes(field, out.rows, out.cols));
  if (bytes.empty()) return absl::OkStatus();
  std::vector<float> aligned(static_cast<size_t>(out.size()));
  std::memcpy(aligned.data(), bytes.data(), bytes.size());
  return backend.Upload(ConstMatrixView(aligned.data(), out.rows, out.cols), out);
}

absl::StatusOr<absl::string_view> StateReader::MatrixBytes(absl::string_view field, int64_t rows, int64_t cols) {
  PRECONDOR_RETURN_IF_ERROR(ExpectInteger(absl::StrCat(field, " rows"), static_cast<uint64_t>(rows)));
  PRECONDOR_RETURN_IF_ERROR(ExpectInteger(absl::StrCat(field, " columns"), static_cast<uint64_t>(cols)));
  return Take(field, static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * sizeof(float));
}

absl::Status StateReader::Finish() const {
  if (bytes_.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("layer state: expected its end, got ", bytes_.size(), " more bytes"));
}

std::string WithChecksum(std::string bytes) {
  Put(bytes, ChecksumOf(kFormat, bytes));
  return bytes;
}

uint64_t SavedChecksum(absl::string_view bytes) {
  PRECONDOR_CHECK(bytes.size() >= sizeof(uint64_t));
  return Get<uint64_t>(bytes.substr(bytes.size() - sizeof(uint64_t)));
}

}  // namespace precondor
