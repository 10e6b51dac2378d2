// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/progress.h"

#include <algorithm>
#include <cstdio>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "kernels/base/clock.h"

namespace precondor::digits {
namespace {

constexpr int64_t kBarWidth = 30;
constexpr absl::Duration kRedraw = absl::Milliseconds(100);

void Print(const std::string& text) { std::fputs(text.c_str(), stderr); }

}  // namespace

Progress::Progress(absl::string_view title)
    : title_(title), terminal_(isatty(STDERR_FILENO) == 1), begin_(MonotonicNow()), drawn_(absl::InfinitePast()) {}

Progress::~Progress() {
  const std::string end = absl::StrFormat("%s: done in %.1f s", title_, absl::ToDoubleSeconds(MonotonicNow() - begin_));
  Print(terminal_ ? absl::StrCat("\r\033[K", end, "\n") : absl::StrCat(end, "\n"));
}

void Progress::Update(int64_t done, int64_t total, absl::string_view what) {
  const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0;
  const double left = share > 0 ? absl::ToDoubleSeconds(MonotonicNow() - begin_) * (1 - share) / share : 0;
  if (!terminal_) {
    const int64_t tenths = total > 0 ? done * 10 / total : 0;
    if (tenths == tenths_) return;
    tenths_ = tenths;
    Print(absl::StrFormat("%s: %d %%, %s\n", title_, tenths * 10, what));
    return;
  }
  const absl::Time now = MonotonicNow();
  if (now - drawn_ < kRedraw) return;
  drawn_ = now;
  const auto full = std::clamp<int64_t>(static_cast<int64_t>(share * kBarWidth), 0, kBarWidth);
  Print(absl::StrFormat("\r\033[K%s [%s%s] %3.0f %%  %.0f s left  %s", title_,
                        std::string(static_cast<size_t>(full), '#'),
                        std::string(static_cast<size_t>(kBarWidth - full), '.'), share * 100, left, what));
  std::fflush(stderr);
}

}  // namespace precondor::digits
