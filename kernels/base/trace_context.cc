// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/trace_context.h"

#include <algorithm>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace precondor {
namespace {

constexpr size_t kTraceDigits = 32, kSpanDigits = 16;
constexpr size_t kVersion00Size = 55;  // 00-<trace>-<span>-<flags>
constexpr unsigned kSampledFlag = 1;

bool IsLowerHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsId(absl::string_view text) { return IsLowerHex(text) && text.find_first_not_of('0') != absl::string_view::npos; }

std::string Hex(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

// Sets a bit, because an id must not be all zero.
uint64_t RandomId() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed = {device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  return random() | 1;
}

// The finalizer of splitmix64: a bijection that spreads neighbours.
uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

std::optional<TraceContext> ParseTraceparent(absl::string_view header) {
  if (header.size() < kVersion00Size || header[2] != '-' || header[35] != '-' || header[52] != '-') return std::nullopt;
  const absl::string_view version = header.substr(0, 2);
  if (!IsLowerHex(version) || version == "ff") return std::nullopt;
  if (header.size() > kVersion00Size && (version == "00" || header[kVersion00Size] != '-')) return std::nullopt;
  const absl::string_view trace = header.substr(3, kTraceDigits), span = header.substr(36, kSpanDigits);
  const absl::string_view flags = header.substr(53, 2);
  unsigned bits = 0;
  if (!IsId(trace) || !IsId(span) || !IsLowerHex(flags) || !absl::SimpleHexAtoi(flags, &bits)) return std::nullopt;
  return TraceContext{std::string(trace), std::string(span), (bits & kSampledFlag) != 0};
}

std::string FormatTraceparent(const TraceContext& context) {
  return absl::StrCat("00-", context.trace_id, "-", context.span_id, context.sampled ? "-01" : "-00");
}

TraceContext NewTrace() { return {absl::StrCat(Hex(RandomId()), Hex(RandomId())), NewSpanId(), false}; }

std::string NewSpanId() { return Hex(RandomId()); }

TraceContext TraceOfStep(uint64_t session_id, uint64_t step) {
  const uint64_t high = Mix(session_id);
  const uint64_t low = Mix(high ^ Mix(step));
  return {absl::StrCat(Hex(high | 1), Hex(low)), Hex(Mix(low) | 1), false};
}

bool InShare(const TraceContext& context, double share) {
  constexpr size_t kDigits = 14;
  uint64_t value = 0;
  if (!absl::SimpleHexAtoi(absl::string_view(context.trace_id).substr(kTraceDigits - kDigits), &value)) return false;
  return static_cast<double>(value) < share * static_cast<double>(uint64_t{1} << (4 * kDigits));
}

}  // namespace precondor
