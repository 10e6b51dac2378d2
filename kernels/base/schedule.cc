// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/schedule.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr uint64_t kMaxSteps = uint64_t{1} << 53;  // all integers up to this are doubles

absl::Status Expected(absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat("expected ", expected, ", got \"", got.substr(0, 64), "\""));
}

absl::StatusOr<double> Number(absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) return Expected("a finite number", text);
  return value;
}

absl::StatusOr<uint64_t> Steps(absl::string_view text) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value == 0 || value > kMaxSteps) {
    return Expected("a positive number of steps", text);
  }
  return value;
}

}  // namespace

absl::StatusOr<Schedule> Schedule::Parse(absl::string_view text) {
  constexpr absl::string_view kForms =
      "a number, exponential(FIRST, RATE, LIMIT), linear(FIRST, LAST, STEPS) or piecewise(FIRST, STEP: VALUE, ...)";
  Schedule out;
  const size_t open = text.find('(');
  if (open == absl::string_view::npos) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) return Expected(kForms, text);
    return Schedule(value);
  }
  const absl::string_view name = text.substr(0, open);
  absl::string_view inner = text.substr(open + 1);
  if (!absl::ConsumeSuffix(&inner, ")")) return Expected(kForms, text);
  const std::vector<absl::string_view> parts = absl::StrSplit(inner, ',');
  PRECONDOR_ASSIGN_OR_RETURN(out.first_, Number(parts[0]));
  if (name == "exponential" && parts.size() == 3) {
    out.kind_ = Kind::kExponential;
    PRECONDOR_ASSIGN_OR_RETURN(out.rate_, Number(parts[1]));
    PRECONDOR_ASSIGN_OR_RETURN(out.last_, Number(parts[2]));
    if (out.rate_ <= 0 || out.rate_ == 1) return Expected("a positive rate other than 1", parts[1]);
    const bool down = (out.rate_ < 1) == (out.first_ > 0);
    if (out.first_ == 0 || (down ? out.last_ > out.first_ : out.last_ < out.first_)) {
      return Expected("a limit that the rate leads to", text);
    }
  } else if (name == "linear" && parts.size() == 3) {
    out.kind_ = Kind::kLinear;
    PRECONDOR_ASSIGN_OR_RETURN(out.last_, Number(parts[1]));
    PRECONDOR_ASSIGN_OR_RETURN(out.steps_, Steps(absl::StripAsciiWhitespace(parts[2])));
  } else if (name == "piecewise" && parts.size() >= 2) {
    out.kind_ = Kind::kPiecewise;
    for (size_t i = 1; i < parts.size(); ++i) {
      const std::pair<absl::string_view, absl::string_view> piece = absl::StrSplit(parts[i], absl::MaxSplits(':', 1));
      PRECONDOR_ASSIGN_OR_RETURN(const uint64_t from, Steps(absl::StripAsciiWhitespace(piece.first)));
      PRECONDOR_ASSIGN_OR_RETURN(const double value, Number(piece.second));
      if (!out.pieces_.empty() && from <= out.pieces_.back().first) return Expected("ascending steps", parts[i]);
      out.pieces_.emplace_back(from, value);
    }
  } else {
    return Expected(kForms, text);
  }
  return out;
}

std::string Schedule::Text(double value) {
  char text[32];
  std::to_chars_result end = std::to_chars(text, text + 16, value, std::chars_format::fixed);
  if (end.ec != std::errc()) end = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end.ptr);
}

double Schedule::At(uint64_t t) const {
  const auto steps = static_cast<double>(t);
  switch (kind_) {
    case Kind::kConstant:
      return first_;
    case Kind::kExponential: {
      const double value = first_ * std::pow(rate_, steps);
      return last_ < first_ ? std::max(value, last_) : std::min(value, last_);
    }
    case Kind::kLinear:
      return t >= steps_ ? last_ : first_ + (last_ - first_) * (steps / static_cast<double>(steps_));
    case Kind::kPiecewise: {
      const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), t,
                                          [](uint64_t at, const auto& piece) { return at < piece.first; });
      return after == pieces_.begin() ? first_ : std::prev(after)->second;
    }
  }
  return first_;
}

double Schedule::lowest() const {
  double bound = kind_ == Kind::kPiecewise ? first_ : std::min(first_, last_);
  for (const auto& piece : pieces_) bound = std::min(bound, piece.second);
  return bound;
}

double Schedule::highest() const {
  double bound = kind_ == Kind::kPiecewise ? first_ : std::max(first_, last_);
  for (const auto& piece : pieces_) bound = std::max(bound, piece.second);
  return bound;
}

}  // namespace precondor
