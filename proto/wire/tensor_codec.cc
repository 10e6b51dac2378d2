// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/tensor_codec.h"

#include <algorithm>
#include <cmath>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"

namespace precondor::wire {
namespace {

absl::Status SizeMismatch(absl::string_view message) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kSizeMismatch, message);
}

// Checks one header completely and returns its bytes.
absl::StatusOr<uint64_t> CheckedBytes(const v1::TensorHeader& header, absl::string_view name) {
  PRECONDOR_ASSIGN_OR_RETURN(const DType dtype, DecodeDType(header.data_type(), absl::StrCat(name, ".data_type")));
  if (header.dims_size() < 1 || header.dims_size() > kMaxTensorDims) {
    return MalformedError(
        absl::StrCat(name, ".dims: expected 1 ... ", kMaxTensorDims, " extents, got ", header.dims_size()));
  }
  if (header.scale() != 0 && !(header.scale() > 0 && std::isfinite(header.scale()))) {
    return MalformedError(absl::StrCat(name, ".scale: expected a positive finite number, got ", header.scale()));
  }
  uint64_t bytes = ByteSize(dtype);
  for (const int64_t dim : header.dims()) {
    if (dim < 1) return MalformedError(absl::StrCat(name, ".dims: expected extents of at least 1, got ", dim));
    if (static_cast<uint64_t>(dim) > kMaxPayloadBytes / bytes) {
      return SizeMismatch(absl::StrCat(name, ": more than ", kMaxPayloadBytes, " bytes"));
    }
    bytes *= static_cast<uint64_t>(dim);
  }
  return bytes;
}

absl::Status CheckSize(absl::string_view what, DType dtype, int64_t rows, int64_t cols, size_t bytes) {
  const uint64_t expected = static_cast<uint64_t>(rows * cols) * ByteSize(dtype);
  if (bytes == expected) return absl::OkStatus();
  return SizeMismatch(absl::StrCat(what, " of ", rows, " x ", cols, " ", DTypeName(dtype), ": expected ", expected,
                                   " bytes, got ", bytes));
}

}  // namespace

v1::TensorHeader EncodeTensorHeader(const TensorFormat& format) {
  v1::TensorHeader header;
  header.set_data_type(EncodeDType(format.dtype));
  for (const int64_t dim : format.dims) header.add_dims(dim);
  if (format.scale != 1.0f) header.set_scale(format.scale);
  return header;
}

absl::StatusOr<TensorFormat> DecodeTensorHeader(const v1::TensorHeader& header, absl::string_view name) {
  PRECONDOR_RETURN_IF_ERROR(CheckedBytes(header, name).status());
  TensorFormat format;
  format.dtype = static_cast<DType>(header.data_type());  // valid, because CheckedBytes accepted it
  format.dims.assign(header.dims().begin(), header.dims().end());
  if (header.scale() != 0) format.scale = header.scale();
  return format;
}

absl::StatusOr<std::vector<TensorFormat>> DecodeTensorHeaders(const TensorHeaders& headers) {
  PRECONDOR_RETURN_IF_ERROR(PayloadBytes(headers).status());
  std::vector<TensorFormat> formats;
  formats.reserve(headers.size());
  for (int i = 0; i < headers.size(); ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(TensorFormat format, DecodeTensorHeader(headers[i], absl::StrCat("tensors[", i, "]")));
    formats.push_back(std::move(format));
  }
  return formats;
}

absl::StatusOr<uint64_t> PayloadBytes(const TensorHeaders& headers) {
  if (headers.size() > kMaxTensors) {
    return MalformedError(absl::StrCat("tensors: expected at most ", kMaxTensors, ", got ", headers.size()));
  }
  uint64_t total = 0;
  for (int i = 0; i < headers.size(); ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const uint64_t bytes, CheckedBytes(headers[i], absl::StrCat("tensors[", i, "]")));
    total += bytes;  // at most kMaxTensors * kMaxPayloadBytes = 2^49
  }
  if (total > kMaxPayloadBytes) {
    return SizeMismatch(absl::StrCat("tensors: ", total, " bytes together, at most ", kMaxPayloadBytes));
  }
  return total;
}

float TensorScale(DType dtype, ConstMatrixView matrix) {
  float scale = 1.0f;
  if (dtype != DType::kF16) return scale;
  // Each row's scale is a power of two of at least 1, so that the largest fits all rows.
  for (int64_t i = 0; i < matrix.rows; ++i) {
    scale = std::max(scale, F16Scale(absl::MakeConstSpan(matrix.row(i), matrix.cols)));
  }
  return scale;
}

absl::Span<const uint8_t> AliasPayload(DType dtype, ConstMatrixView matrix) {
#ifdef ABSL_IS_LITTLE_ENDIAN
  if (dtype == DType::kF32 && matrix.contiguous()) {
    return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(matrix.data), matrix.size() * sizeof(float));
  }
#endif
  return {};
}

absl::Status EncodeMatrix(DType dtype, float scale, ConstMatrixView matrix, absl::Span<uint8_t> out) {
  PRECONDOR_RETURN_IF_ERROR(CheckSize("output", dtype, matrix.rows, matrix.cols, out.size()));
  if (matrix.contiguous()) {
    EncodeElements(dtype, absl::MakeConstSpan(matrix.data, matrix.size()), scale, out.data());
    return absl::OkStatus();
  }
  const size_t row_bytes = matrix.cols * ByteSize(dtype);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    EncodeElements(dtype, absl::MakeConstSpan(matrix.row(i), matrix.cols), scale, out.data() + i * row_bytes);
  }
  return absl::OkStatus();
}

std::vector<Chunk> PlanChunks(uint64_t payload_bytes, uint64_t chunk_bytes) {
  chunk_bytes = std::max<uint64_t>(chunk_bytes, 1);
  std::vector<Chunk> chunks;
  chunks.reserve(payload_bytes / chunk_bytes + 1);
  uint64_t offset = 0;
  do {
    const uint64_t size = std::min(chunk_bytes, payload_bytes - offset);
    chunks.push_back({offset, size});
    offset += size;
  } while (offset < payload_bytes);
  return chunks;
}

}  // namespace precondor::wire
