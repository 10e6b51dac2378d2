// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/state_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as the host has them");

constexpr absl::string_view kMagic = "PCDRSTAT";
constexpr uint32_t kFormat = 1;
constexpr size_t kShownText = 200;

// FNV-1a over words of 8 bytes, the last one filled with zeros, and the length: finds what a disk or a cut-off copy
// does, at the speed of memory.
uint64_t Checksum(absl::string_view bytes) {
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t sum = 0xcbf29ce484222325;
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + begin, std::min(sizeof(word), bytes.size() - begin));
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 32;  // a product's low bits never see its high ones
  }
  return (sum ^ bytes.size()) * kPrime;
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

StateWriter::StateWriter(absl::string_view method) : bytes_(kMagic) {
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
  Integer(static_cast<uint64_t>(matrix.rows));
  Integer(static_cast<uint64_t>(matrix.cols));
  if (matrix.size() == 0) return absl::OkStatus();
  std::vector<float> elements(static_cast<size_t>(matrix.size()));
  PRECONDOR_RETURN_IF_ERROR(backend.Download(matrix, MatrixView(elements.data(), matrix.rows, matrix.cols)));
  bytes_.append(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(float));
  return absl::OkStatus();
}

std::string StateWriter::Finish() {
  Put(bytes_, Checksum(bytes_));
  return std::move(bytes_);
}

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
  if (Get<uint32_t>(format) != kFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer state: format: expected ", kFormat, ", got ", Get<uint32_t>(format)));
  }
  if (bytes_.size() < sizeof(uint64_t)) return absl::DataLossError("layer state: checksum: missing");
  const size_t body = bytes_.size() - sizeof(uint64_t);
  const uint64_t stored = Get<uint64_t>(bytes_.substr(body));
  const absl::string_view all(magic.data(), kMagic.size() + sizeof(kFormat) + body);
  if (Checksum(all) != stored) {
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
  if (count > bytes_.size() / sizeof(double)) return Take(field, count).status();
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

absl::Status StateReader::ExpectText(absl::string_view field, absl::string_view expected) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t size, Integer(field));
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view got, Take(field, size));
  if (got == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("layer state: ", field, ": expected \"", expected, "\", got \"", got.substr(0, kShownText), "\""));
}

absl::Status StateReader::Matrix(absl::string_view field, Backend& backend, MatrixView out) {
  PRECONDOR_RETURN_IF_ERROR(ExpectInteger(absl::StrCat(field, " rows"), static_cast<uint64_t>(out.rows)));
  PRECONDOR_RETURN_IF_ERROR(ExpectInteger(absl::StrCat(field, " columns"), static_cast<uint64_t>(out.cols)));
  const size_t elements = static_cast<size_t>(out.size());
  PRECONDOR_ASSIGN_OR_RETURN(const absl::string_view bytes, Take(field, elements * sizeof(float)));
  if (elements == 0) return absl::OkStatus();
  std::vector<float> aligned(elements);
  std::memcpy(aligned.data(), bytes.data(), bytes.size());
  return backend.Upload(ConstMatrixView(aligned.data(), out.rows, out.cols), out);
}

absl::Status StateReader::Finish() const {
  if (bytes_.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("layer state: expected its end, got ", bytes_.size(), " more bytes"));
}

}  // namespace precondor
