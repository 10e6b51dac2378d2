// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/digits_data.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/check.h"
#include "kernels/base/random.h"

namespace precondor::digits {
namespace {

constexpr float kFullPixel = 16;
constexpr uint64_t kSplitSeed = 1998, kSplitPurpose = 1, kBatchPurpose = 2;
constexpr int64_t kHeldOutShare = 5;

}  // namespace

absl::StatusOr<DigitsData> LoadDigits(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  std::vector<int32_t> labels;
  std::vector<float> pixels;
  for (std::string line; std::getline(file, line);) {
    for (const absl::string_view field : absl::StrSplit(line, ',')) {
      int32_t value = 0;
      PRECONDOR_CHECK(absl::SimpleAtoi(field, &value));
      pixels.push_back(static_cast<float>(value) / kFullPixel);
    }
    PRECONDOR_CHECK(pixels.size() == (labels.size() + 1) * kPixels + 1);
    labels.push_back(static_cast<int32_t>(pixels.back() * kFullPixel));
    pixels.pop_back();
  }
  Examples all{HostMatrix(static_cast<int64_t>(labels.size()), kPixels), labels};
  all.pixels.data() = std::move(pixels);
  std::vector<int32_t> order = Permutation({kSplitSeed, kSplitPurpose, 0}, all.size());
  const auto held_out = static_cast<size_t>(all.size() / kHeldOutShare);
  std::sort(order.begin(), order.begin() + all.size() / kHeldOutShare);  // both parts keep the file's order
  std::sort(order.begin() + all.size() / kHeldOutShare, order.end());
  const absl::Span<const int32_t> rows = order;
  return DigitsData{Select(all, rows.subspan(held_out)), Select(all, rows.first(held_out))};
}

Examples Select(const Examples& from, absl::Span<const int32_t> rows) {
  Examples to{HostMatrix(static_cast<int64_t>(rows.size()), kPixels), std::vector<int32_t>(rows.size())};
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* source = from.pixels.view().row(rows[i]);
    std::copy(source, source + kPixels, to.pixels.view().row(static_cast<int64_t>(i)));
    to.labels[i] = from.labels[static_cast<size_t>(rows[i])];
  }
  return to;
}

std::vector<int32_t> Permutation(absl::Span<const uint64_t> key, int64_t n) {
  const CounterRandom bits(key);
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[bits.Bits(order.size() - i) % i]);
  return order;
}

std::vector<int32_t> BatchRows(int64_t examples, int64_t batch_size, uint64_t seed, uint64_t step) {
  const auto per_pass = static_cast<uint64_t>(examples / batch_size);
  const std::vector<int32_t> order = Permutation({seed, kBatchPurpose, step / per_pass}, examples);
  const auto begin = order.begin() + static_cast<int64_t>(step % per_pass) * batch_size;
  return std::vector<int32_t>(begin, begin + batch_size);
}

}  // namespace precondor::digits
