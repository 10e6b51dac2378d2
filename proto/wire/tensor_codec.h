// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes the tensors of a payload: headers, sizes, and elements to and from f32 matrices. Bytes are
// little-endian. Errors have an ErrorReason. Pure functions; thread-safe.
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

// Limits of one payload. Within them no size overflows.
inline constexpr int kMaxTensors = 8;
inline constexpr int kMaxTensorDims = 8;
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 46;

// Chunk size that senders use, in bytes.
inline constexpr uint64_t kChunkBytes = 1 << 20;

// Contents of a TensorHeader: value = element * scale.
struct TensorFormat {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  float scale = 1.0f;
  bool operator==(const TensorFormat&) const = default;
};

using TensorHeaders = google::protobuf::RepeatedPtrField<v1::TensorHeader>;

v1::TensorHeader EncodeTensorHeader(const TensorFormat& format);
// Returns InvalidArgument: MALFORMED for an unknown type, no dims or too many, a dim below 1, or a scale that is not
// positive and finite (0 means 1); SIZE_MISMATCH above kMaxPayloadBytes. `name` identifies the tensor in the message.
absl::StatusOr<TensorFormat> DecodeTensorHeader(const v1::TensorHeader& header, absl::string_view name);
absl::StatusOr<std::vector<TensorFormat>> DecodeTensorHeaders(const TensorHeaders& headers);

// Returns the size in bytes of the payload that the headers describe. Errors as DecodeTensorHeader, and MALFORMED for
// more than kMaxTensors. Allocates nothing.
absl::StatusOr<uint64_t> PayloadBytes(const TensorHeaders& headers);

// Returns the scale for encoding `matrix`: 1, except for f16, where it keeps the largest |element| in range.
float TensorScale(DType dtype, ConstMatrixView matrix);

// Returns the memory of `matrix` as payload bytes, without a copy. Empty if the matrix must be encoded: another type,
// gaps between rows, a big-endian host or no elements.
absl::Span<const uint8_t> AliasPayload(DType dtype, ConstMatrixView matrix);

// Writes the elements of `matrix`, row by row and divided by `scale`, to `out`. Returns InvalidArgument (SIZE_MISMATCH)
// unless `out` has exactly the size of rows * cols elements.
absl::Status EncodeMatrix(DType dtype, float scale, ConstMatrixView matrix, absl::Span<uint8_t> out);

// The part of a payload that one frame carries.
struct Chunk {
  uint64_t offset = 0;
  uint64_t size = 0;
};

// Divides [0, payload_bytes) into parts of chunk_bytes (at least 1), in order; the last one may be smaller. Without a
// payload there is one empty chunk, because the header must still be sent.
std::vector<Chunk> PlanChunks(uint64_t payload_bytes, uint64_t chunk_bytes = kChunkBytes);

}  // namespace precondor::wire
