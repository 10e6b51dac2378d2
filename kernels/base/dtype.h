// SPDX-License-Identifier: Apache-2.0
// Element types of tensors on the wire and in storage, and conversions between them and f32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3 };

// Bytes of one element: 4, 2 or 2.
size_t ByteSize(DType dtype);

// Returns "f32", "f16" or "bf16".
absl::string_view DTypeName(DType dtype);

// out[i] = float(in[i]) * scale, from little-endian elements of `dtype` at `in` (any alignment).
// `in` holds out.size() elements.
void DecodeElements(DType dtype, const void* in, float scale, absl::Span<float> out);

// out[i] = dtype(in[i] / scale), rounded to nearest even, little-endian, at any alignment.
// f16 overflow becomes infinity: choose scale with F16Scale first.
void EncodeElements(DType dtype, absl::Span<const float> in, float scale, void* out);

// Returns the power of two by which to divide so that the largest |x| fits f16 with headroom. Returns 1 if all values
// are small enough, or if the largest is zero or not finite. It keeps n * g sketches of many rows from overflowing.
float F16Scale(absl::Span<const float> values);

// Returns true if no element is NaN or infinite.
bool AllFinite(absl::Span<const float> values);

}  // namespace precondor
