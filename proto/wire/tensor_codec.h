// SPDX-License-Identifier: Apache-2.0
// Tensors of a payload: their headers, their sizes, and elements to and from f32 matrices. Bytes are little-endian.
// Errors carry an ErrorReason. Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/dtype.h"
#include "kernels/base/matrix_view.h"
#include "precondor/v1/common.pb.h"

namespace precondor::wire {

// Limits of one payload; within them no size overflows.
inline constexpr int kMaxTensors = 8;
inline constexpr int kMaxTensorDims = 8;
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 46;

// Size in which senders cut payloads.
inline constexpr uint64_t kChunkBytes = 1 << 20;

// What a TensorHeader says: value = element * scale.
struct TensorFormat {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  float scale = 1.0f;
  bool operator==(const TensorFormat&) const = default;
};

using TensorHeaders = google::protobuf::RepeatedPtrField<v1::TensorHeader>;

v1::TensorHeader EncodeTensorHeader(const TensorFormat& format);
// InvalidArgument: MALFORMED for an unknown type, no or too many dims, a dim below 1, a scale that is not positive and
// finite (0 means 1); `name` is how the message calls the tensor. SIZE_MISMATCH above kMaxPayloadBytes.
absl::StatusOr<TensorFormat> DecodeTensorHeader(const v1::TensorHeader& header, absl::string_view name);
absl::StatusOr<std::vector<TensorFormat>> DecodeTensorHeaders(const TensorHeaders& headers);

// Bytes of the whole payload that the headers describe, one tensor after the other. Errors as DecodeTensorHeader, and
// MALFORMED for more than kMaxTensors. Allocates nothing.
absl::StatusOr<uint64_t> PayloadBytes(const TensorHeaders& headers);

// The scale to encode `matrix` with: 1 but for f16, where it keeps the largest |element| in range.
float TensorScale(DType dtype, ConstMatrixView matrix);

// The memory of `matrix` as payload bytes, without a copy; empty when it has to be encoded (another type, gaps between
// rows, a big-endian host, no elements).
absl::Span<const uint8_t> AliasPayload(DType dtype, ConstMatrixView matrix);

// out = the elements of `matrix`, row by row, divided by scale. InvalidArgument (SIZE_MISMATCH) unless out holds
// exactly rows * cols elements.
absl::Status EncodeMatrix(DType dtype, float scale, ConstMatrixView matrix, absl::Span<uint8_t> out);
// The inverse; `in` at any alignment.
absl::Status DecodeMatrix(DType dtype, float scale, absl::Span<const uint8_t> in, MatrixView out);

// One frame's part of a payload.
struct Chunk {
  uint64_t offset = 0;
  uint64_t size = 0;
};

// [0, payload_bytes) in order, in parts of chunk_bytes (at least 1) and a last one of what is left; one empty chunk
// when there is no payload, since the header travels anyway.
std::vector<Chunk> PlanChunks(uint64_t payload_bytes, uint64_t chunk_bytes = kChunkBytes);

}  // namespace precondor::wire
