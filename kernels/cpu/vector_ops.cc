// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/vector_ops.h"

#include <cstring>

#ifdef PRECONDOR_HAVE_HIGHWAY

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/vector_ops.cc"  // Highway compiles this file once for each target
#include "hwy/foreach_target.h"
// Must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace precondor::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Four concurrent sums keep the adders busy.
double Dot(const float* x, const float* y, int64_t n) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> narrow;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(wide));
  auto sum0 = hn::Zero(wide), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  const auto add = [&](int64_t at, auto& sum) HWY_ATTR {
    sum =
        hn::MulAdd(hn::PromoteTo(wide, hn::LoadU(narrow, x + at)), hn::PromoteTo(wide, hn::LoadU(narrow, y + at)), sum);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    add(i, sum0);
    add(i + lanes, sum1);
    add(i + 2 * lanes, sum2);
    add(i + 3 * lanes, sum3);
  }
  double total = hn::GetLane(hn::SumOfLanes(wide, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < n; ++i) total += static_cast<double>(x[i]) * y[i];
  return total;
}

double WeightedSquare(const float* weights, const float* x, int64_t n) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> narrow;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(wide));
  auto sum = hn::Zero(wide);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto element = hn::LoadU(narrow, x + i);
    const auto weighted = hn::Mul(hn::LoadU(narrow, weights + i), element);
    sum = hn::MulAdd(hn::PromoteTo(wide, weighted), hn::PromoteTo(wide, element), sum);
  }
  double total = hn::GetLane(hn::SumOfLanes(wide, sum));
  for (; i < n; ++i) total += static_cast<double>(weights[i] * x[i]) * x[i];
  return total;
}

void Scale(float scale, const float* x, int64_t n, float* y) {
  const hn::ScalableTag<float> tag;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(tag));
  const auto factor = hn::Set(tag, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(factor, hn::LoadU(tag, x + i)), tag, y + i);
  for (; i < n; ++i) y[i] = scale * x[i];
}

// A bf16 is the upper half of an f32. Adding half a unit of its last place, less a little if that place is even,
// carries into it exactly when it must be rounded up.
using Bits = hn::ScalableTag<uint32_t>;
HWY_INLINE hn::Vec<Bits> Rounded(hn::Vec<Bits> bits) {
  const Bits tag;
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(tag, 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(tag, 0x7fff)));
}
HWY_INLINE hn::Vec<Bits> LoadBits(const float* from) {
  return hn::BitCast(Bits(), hn::LoadU(hn::ScalableTag<float>(), from));
}
uint32_t RoundedOne(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits + 0x7fff + (bits >> 16 & 1);
}

void RoundToBf16(const float* x, int64_t n, uint16_t* y) {
  const Bits tag;
  const hn::Rebind<uint16_t, Bits> narrow;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(tag));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    // As signed numbers they are below 2^15 in magnitude, so none saturates.
    const auto upper = hn::ShiftRight<16>(hn::BitCast(hn::RebindToSigned<Bits>(), Rounded(LoadBits(x + i))));
    hn::StoreU(hn::BitCast(narrow, hn::DemoteTo(hn::RebindToSigned<decltype(narrow)>(), upper)), narrow, y + i);
  }
  for (; i < n; ++i) y[i] = static_cast<uint16_t>(RoundedOne(x[i]) >> 16);
}

void PairAsBf16(const float* low, const float* high, int64_t n, uint32_t* out) {
  const Bits tag;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(tag));
  const auto upper_half = hn::Set(tag, 0xffff0000u);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto upper = high == nullptr ? hn::Zero(tag) : hn::And(Rounded(LoadBits(high + i)), upper_half);
    hn::StoreU(hn::Or(hn::ShiftRight<16>(Rounded(LoadBits(low + i))), upper), tag, out + i);
  }
  for (; i < n; ++i) out[i] = RoundedOne(low[i]) >> 16 | (high == nullptr ? 0 : RoundedOne(high[i]) & 0xffff0000u);
}

// Works row by row, because the processor prefetches one stream better than several.
void RowProducts(ConstMatrixView rows, const float* x, float* out) {
  const hn::ScalableTag<float> tag;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(tag)), n = rows.cols;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const float* in = rows.row(row);
    auto sum0 = hn::Zero(tag), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    const auto add = [&](int64_t at, auto& sum)
                         HWY_ATTR { sum = hn::MulAdd(hn::LoadU(tag, in + at), hn::LoadU(tag, x + at), sum); };
    int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      add(i, sum0);
      add(i + lanes, sum1);
      add(i + 2 * lanes, sum2);
      add(i + 3 * lanes, sum3);
    }
    float total = hn::GetLane(hn::SumOfLanes(tag, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
    for (; i < n; ++i) total += in[i] * x[i];
    out[row] = total;
  }
}

}  // namespace
}  // namespace precondor::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace precondor::cpu {

HWY_EXPORT(Dot);
HWY_EXPORT(WeightedSquare);
HWY_EXPORT(Scale);
HWY_EXPORT(RoundToBf16);
HWY_EXPORT(PairAsBf16);
HWY_EXPORT(RowProducts);

double Dot(const float* x, const float* y, int64_t n) { return HWY_DYNAMIC_DISPATCH(Dot)(x, y, n); }

double WeightedSquare(const float* weights, const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(WeightedSquare)(weights, x, n);
}

void Scale(float scale, const float* x, int64_t n, float* y) { HWY_DYNAMIC_DISPATCH(Scale)(scale, x, n, y); }

void RoundToBf16(const float* x, int64_t n, uint16_t* y) { HWY_DYNAMIC_DISPATCH(RoundToBf16)(x, n, y); }

void PairAsBf16(const float* low, const float* high, int64_t n, uint32_t* out) {
  HWY_DYNAMIC_DISPATCH(PairAsBf16)(low, high, n, out);
}

void RowProducts(ConstMatrixView rows, const float* x, float* out) { HWY_DYNAMIC_DISPATCH(RowProducts)(rows, x, out); }

}  // namespace precondor::cpu
#endif

#else

#include <cblas.h>

namespace precondor::cpu {

// Four partial sums keep the order of additions fixed and let the loop vectorise.
double Dot(const float* x, const float* y, int64_t n) {
  double sums[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int k = 0; k < 4; ++k) sums[k] += static_cast<double>(x[i + k]) * y[i + k];
  }
  for (; i < n; ++i) sums[0] += static_cast<double>(x[i]) * y[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

double WeightedSquare(const float* weights, const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(weights[i] * x[i]) * x[i];
  return sum;
}

void Scale(float scale, const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = scale * x[i];
}

namespace {

// Returns bits whose upper half is x as bf16: half a unit of its last place, less a little if that place is even, has
// carried into it.
uint32_t Rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits + 0x7fff + (bits >> 16 & 1);
}

}  // namespace

void RoundToBf16(const float* x, int64_t n, uint16_t* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<uint16_t>(Rounded(x[i]) >> 16);
}

void PairAsBf16(const float* low, const float* high, int64_t n, uint32_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Rounded(low[i]) >> 16 | (high == nullptr ? 0 : Rounded(high[i]) & 0xffff0000u);
  }
}

void RowProducts(ConstMatrixView rows, const float* x, float* out) {
  cblas_sgemv(CblasRowMajor, CblasNoTrans, rows.rows, rows.cols, 1.0f, rows.data, rows.stride, x, 1, 0.0f, out, 1);
}

}  // namespace precondor::cpu

#endif
