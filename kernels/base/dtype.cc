// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

// Payload bytes are little-endian; so is every machine we run on, which lets conversions be plain copies.
static_assert(std::endian::native == std::endian::little);

namespace precondor {
namespace {

// Both directions of f16 in integer and float arithmetic without branches, so that compilers vectorise the loops.
float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Shifting puts exponent and mantissa in place; the product moves the exponent's bias and normalises subnormals.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits |= magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN keep their exponent
  return std::bit_cast<float>(bits | sign);
}

uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal halves: rebias, add half a unit (and the last kept bit, for ties to even), drop 13 bits.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal halves: adding 0.5 aligns the mantissa at 2^-24, and the addition rounds to nearest even.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // overflow
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return static_cast<uint16_t>(half | sign);
}

float BFloatToFloat(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

uint16_t FloatToBFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

template <typename Convert>
void Decode16(const void* in, float scale, absl::Span<float> out, Convert convert) {
  const char* bytes = static_cast<const char*>(in);
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t element;
    std::memcpy(&element, bytes + 2 * i, sizeof(element));
    out[i] = convert(element) * scale;
  }
}

template <typename Convert>
void Encode16(absl::Span<const float> in, float inverse, void* out, Convert convert) {
  char* bytes = static_cast<char*>(out);
  for (size_t i = 0; i < in.size(); ++i) {
    const uint16_t element = convert(in[i] * inverse);
    std::memcpy(bytes + 2 * i, &element, sizeof(element));
  }
}

}  // namespace

size_t ByteSize(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("dtype: expected f32, f16 or bf16, got \"", name, "\""));
}

void DecodeElements(DType dtype, const void* in, float scale, absl::Span<float> out) {
  switch (dtype) {
    case DType::kF32:
      if (!out.empty()) std::memcpy(out.data(), in, out.size() * sizeof(float));
      if (scale != 1.0f) {
        for (float& x : out) x *= scale;
      }
      return;
    case DType::kF16:
      return Decode16(in, scale, out, HalfToFloat);
    case DType::kBF16:
      return Decode16(in, scale, out, BFloatToFloat);
  }
}

void EncodeElements(DType dtype, absl::Span<const float> in, float scale, void* out) {
  const float inverse = 1.0f / scale;
  switch (dtype) {
    case DType::kF32: {
      if (scale == 1.0f) {
        if (!in.empty()) std::memcpy(out, in.data(), in.size() * sizeof(float));
        return;
      }
      char* bytes = static_cast<char*>(out);
      for (size_t i = 0; i < in.size(); ++i) {
        const float element = in[i] * inverse;
        std::memcpy(bytes + 4 * i, &element, sizeof(element));
      }
      return;
    }
    case DType::kF16:
      return Encode16(in, inverse, out, FloatToHalf);
    case DType::kBF16:
      return Encode16(in, inverse, out, FloatToBFloat);
  }
}

float F16Scale(absl::Span<const float> values) {
  constexpr float kHeadroom = 16384.0f;  // a quarter of the largest f16
  float largest = 0;
  for (float value : values) largest = std::max(largest, std::fabs(value));
  if (!(largest > kHeadroom) || !AllFinite(values)) return 1.0f;
  int exponent;
  std::frexp(largest / kHeadroom, &exponent);
  return std::ldexp(1.0f, exponent);
}

bool AllFinite(absl::Span<const float> values) {
  // An all-ones exponent marks NaN and infinity; integer compares vectorise whatever the floating-point flags.
  uint32_t bad = 0;
  for (float value : values)
    bad |= static_cast<uint32_t>((std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u);
  return bad == 0;
}

}  // namespace precondor
