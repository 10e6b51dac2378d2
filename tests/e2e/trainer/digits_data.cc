// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/trainer/digits_data.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "kernels/base/random.h"

namespace precondor::digits {
namespace {

constexpr int32_t kFullPixel = 16;
constexpr uint64_t kSplitSeed = 1998, kSplitPurpose = 1, kBatchPurpose = 2;
constexpr int64_t kHeldOutShare = 5;

// False when the line is not 64 pixels and a label.
bool ParseLine(absl::string_view line, float* pixels, int32_t& label) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ',');
  if (fields.size() != kPixels + 1) return false;
  for (size_t i = 0; i < kPixels; ++i) {
    int32_t value = 0;
    if (!absl::SimpleAtoi(fields[i], &value) || value < 0 || value > kFullPixel) return false;
    pixels[i] = static_cast<float>(value) / static_cast<float>(kFullPixel);
  }
  return absl::SimpleAtoi(fields.back(), &label) && label >= 0 && label < kClasses;
}

}  // namespace

absl::StatusOr<Examples> ParseDigits(absl::string_view text) {
  absl::ConsumeSuffix(&text, "\n");
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  Examples examples{HostMatrix(static_cast<int64_t>(lines.size()), kPixels), std::vector<int32_t>(lines.size())};
  for (size_t i = 0; i < lines.size(); ++i) {
    if (ParseLine(lines[i], examples.pixels.view().row(static_cast<int64_t>(i)), examples.labels[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat("line ", i + 1, ": expected ", kPixels, " pixels 0 ... ", kFullPixel,
                                                   " and a label 0 ... ", kClasses - 1, ", got \"", lines[i], "\""));
  }
  return examples;
}

absl::StatusOr<DigitsData> LoadDigits(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  std::stringstream text;
  text << file.rdbuf();
  const absl::StatusOr<Examples> all = ParseDigits(text.str());
  if (!all.ok()) return absl::Status(all.status().code(), absl::StrCat(path, ": ", all.status().message()));
  std::vector<int32_t> order = Permutation({kSplitSeed, kSplitPurpose, 0}, all->size());
  const auto held_out = static_cast<size_t>(all->size() / kHeldOutShare);
  std::sort(order.begin(), order.begin() + all->size() / kHeldOutShare);  // both parts keep the file's order
  std::sort(order.begin() + all->size() / kHeldOutShare, order.end());
  const absl::Span<const int32_t> rows = order;
  return DigitsData{Select(*all, rows.subspan(held_out)), Select(*all, rows.first(held_out))};
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
