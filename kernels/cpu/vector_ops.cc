// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/vector_ops.h"

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
HWY_EXPORT(RowProducts);

double Dot(const float* x, const float* y, int64_t n) { return HWY_DYNAMIC_DISPATCH(Dot)(x, y, n); }

double WeightedSquare(const float* weights, const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(WeightedSquare)(weights, x, n);
}

void Scale(float scale, const float* x, int64_t n, float* y) { HWY_DYNAMIC_DISPATCH(Scale)(scale, x, n, y); }

void RowProducts(ConstMatrixView rows, const float* x, float* out) { HWY_DYNAMIC_DISPATCH(RowProducts)(rows, x, out); }

}  // namespace precondor::cpu
#endif
