// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/base/attributes.h"

// Payload bytes are little-endian, as are all supported machines. So conversions can be plain copies.
static_assert(std::endian::native == std::endian::little);

namespace precondor {
namespace {

// Both directions of f16 in integer and float arithmetic without branches, so that compilers vectorise the loops.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // Shifting puts exponent and mantissa in place; the product moves the exponent's bias and normalises subnormals.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits |= magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN keep their exponent
  return std::bit_cast<float>(bits | sign);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Values from 2^16 on become infinity. Values that round up to 2^16 become infinity by the carry.
  const uint32_t clamped = std::min(magnitude, 0x47800000u);
  // Normal halves: rebias, add half a unit (and the last kept bit, for ties to even), drop 13 bits.
  const uint32_t normal = (clamped - 0x38000000u + 0xfffu + ((clamped >> 13) & 1u)) >> 13;
  // Subnormal halves: adding 0.5 aligns the mantissa at 2^-24, and the addition rounds to nearest even.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(clamped) + 0.5f) - 0x3f000000u;
  // Selects by masks made from sign bits. Comparisons lead compilers to branch around the floating-point addition, and
  // a loop with branches is not vectorised.
  const auto is_subnormal = static_cast<uint32_t>(static_cast<int32_t>(magnitude - 0x38800000u) >> 31);
  const auto is_nan = static_cast<uint32_t>(static_cast<int32_t>(0x7f800000u - magnitude) >> 31);
  const uint32_t half = (subnormal & is_subnormal) | (normal & ~is_subnormal) | (is_nan & 0x200u);
  return static_cast<uint16_t>(half | sign);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline float BFloatToFloat(uint16_t value) {
  return std::bit_cast<float>(uint32_t{value} << 16);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline uint16_t FloatToBFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

struct HalfCodec {
  ABSL_ATTRIBUTE_ALWAYS_INLINE static float Decode(uint16_t bits) { return HalfToFloat(bits); }
  ABSL_ATTRIBUTE_ALWAYS_INLINE static uint16_t Encode(float value) { return FloatToHalf(value); }
};
struct BFloatCodec {
  ABSL_ATTRIBUTE_ALWAYS_INLINE static float Decode(uint16_t bits) { return BFloatToFloat(bits); }
  ABSL_ATTRIBUTE_ALWAYS_INLINE static uint16_t Encode(float value) { return FloatToBFloat(value); }
};

// The loops, inlined below once for the baseline and once for AVX2. Both do the same integer and float operations and
// so give equal bits. Inlining must be forced, because the enclosing function decides the instruction set.
template <typename Codec>
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void Decode16(const char* in, float scale, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    uint16_t element;
    std::memcpy(&element, in + 2 * i, sizeof(element));
    out[i] = Codec::Decode(element) * scale;
  }
}

template <typename Codec>
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void Encode16(const float* in, float inverse, char* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint16_t element = Codec::Encode(in[i] * inverse);
    std::memcpy(out + 2 * i, &element, sizeof(element));
  }
}

// An all-ones exponent marks NaN and infinity. Integer comparisons vectorise whatever the floating-point flags are.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool Finite(const float* in, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) bad |= (std::bit_cast<uint32_t>(in[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return bad == 0;
}

// Magnitudes have the order of their bit patterns, with NaN last.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline uint32_t LargestMagnitude(const float* in, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(in[i]) & 0x7fffffffu);
  return largest;
}

#if defined(__x86_64__)
#define PRECONDOR_AVX2 __attribute__((target("avx2")))
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0; }
#else
#define PRECONDOR_AVX2
bool HasAvx2() { return false; }
#endif

template <typename Codec>
PRECONDOR_AVX2 void Decode16Avx2(const char* in, float scale, float* out, size_t n) {
  Decode16<Codec>(in, scale, out, n);
}
template <typename Codec>
PRECONDOR_AVX2 void Encode16Avx2(const float* in, float inverse, char* out, size_t n) {
  Encode16<Codec>(in, inverse, out, n);
}
PRECONDOR_AVX2 bool FiniteAvx2(const float* in, size_t n) { return Finite(in, n); }
PRECONDOR_AVX2 uint32_t LargestMagnitudeAvx2(const float* in, size_t n) { return LargestMagnitude(in, n); }
#undef PRECONDOR_AVX2

template <typename Codec>
void DecodeWith(const void* in, float scale, absl::Span<float> out) {
  const auto* bytes = static_cast<const char*>(in);
  HasAvx2() ? Decode16Avx2<Codec>(bytes, scale, out.data(), out.size())
            : Decode16<Codec>(bytes, scale, out.data(), out.size());
}

template <typename Codec>
void EncodeWith(absl::Span<const float> in, float inverse, void* out) {
  auto* bytes = static_cast<char*>(out);
  HasAvx2() ? Encode16Avx2<Codec>(in.data(), inverse, bytes, in.size())
            : Encode16<Codec>(in.data(), inverse, bytes, in.size());
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
  return "UNKNOWN";
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
      return DecodeWith<HalfCodec>(in, scale, out);
    case DType::kBF16:
      return DecodeWith<BFloatCodec>(in, scale, out);
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
      return EncodeWith<HalfCodec>(in, inverse, out);
    case DType::kBF16:
      return EncodeWith<BFloatCodec>(in, inverse, out);
  }
}

float F16Scale(absl::Span<const float> values) {
  constexpr float kHeadroom = 16384.0f;  // a quarter of the largest f16
  const uint32_t bits =
      HasAvx2() ? LargestMagnitudeAvx2(values.data(), values.size()) : LargestMagnitude(values.data(), values.size());
  const auto largest = std::bit_cast<float>(bits);
  if (!(largest > kHeadroom) || !std::isfinite(largest)) return 1.0f;
  int exponent;
  std::frexp(largest / kHeadroom, &exponent);
  return std::ldexp(1.0f, exponent);
}

bool AllFinite(absl::Span<const float> values) {
  return HasAvx2() ? FiniteAvx2(values.data(), values.size()) : Finite(values.data(), values.size());
}

}  // namespace precondor
