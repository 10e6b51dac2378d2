// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/digits_data.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "client/cpp/examples/seeded_random.h"

namespace precondor::digits {
namespace {

constexpr int32_t kFullPixel = 16;
constexpr uint64_t kSplitSeed = 1998;
constexpr uint64_t kSplitPurpose = 1;
constexpr uint64_t kBatchPurpose = 2;
constexpr int64_t kHeldOutShare = 5;

absl::Status ParseLine(absl::string_view line, int64_t number, float* pixels, int32_t* label) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ',');
  if (fields.size() != kPixels + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("line ", number, ": expected ", kPixels, " pixels and a label, got ", fields.size(), " fields"));
  }
  for (int64_t i = 0; i <= kPixels; ++i) {
    const int32_t largest = i == kPixels ? static_cast<int32_t>(kClasses) - 1 : kFullPixel;
    int32_t value = 0;
    if (!absl::SimpleAtoi(fields[static_cast<size_t>(i)], &value) || value < 0 || value > largest) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, ", field ", i + 1, ": expected 0 ... ", largest,
                                                     ", got \"", fields[static_cast<size_t>(i)], "\""));
    }
    if (i == kPixels) {
      *label = value;
    } else {
      pixels[i] = static_cast<float>(value) / static_cast<float>(kFullPixel);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Examples> ParseDigits(absl::string_view text) {
  absl::ConsumeSuffix(&text, "\n");
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  Examples examples{HostMatrix(static_cast<int64_t>(lines.size()), kPixels), std::vector<int32_t>(lines.size())};
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    absl::Status status = ParseLine(lines[i], row + 1, examples.pixels.view().row(row), &examples.labels[i]);
    if (!status.ok()) return status;
  }
  return examples;
}

DigitsData Split(const Examples& all, uint64_t seed) {
  std::vector<int32_t> order = SeededRandom(seed, kSplitPurpose).Permutation(all.size());
  const auto boundary = order.begin() + all.size() / kHeldOutShare;
  std::sort(order.begin(), boundary);
  std::sort(boundary, order.end());
  const auto held_out = static_cast<size_t>(boundary - order.begin());
  return DigitsData{Select(all, absl::MakeConstSpan(order).subspan(held_out)),
                    Select(all, absl::MakeConstSpan(order).first(held_out))};
}

absl::StatusOr<DigitsData> LoadDigits(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  std::stringstream text;
  text << file.rdbuf();
  absl::StatusOr<Examples> all = ParseDigits(text.str());
  if (!all.ok()) return absl::Status(all.status().code(), absl::StrCat(path, ": ", all.status().message()));
  return Split(*all, kSplitSeed);
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

std::vector<int32_t> BatchRows(int64_t examples, int64_t batch_size, uint64_t seed, uint64_t step) {
  const auto per_pass = static_cast<uint64_t>(examples / batch_size);
  const std::vector<int32_t> order = SeededRandom(seed, kBatchPurpose, step / per_pass).Permutation(examples);
  const auto begin = order.begin() + static_cast<int64_t>(step % per_pass) * batch_size;
  return std::vector<int32_t>(begin, begin + batch_size);
}

}  // namespace precondor::digits
