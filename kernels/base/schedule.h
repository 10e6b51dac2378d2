// SPDX-License-Identifier: Apache-2.0
// A number that is a pure function of a count of steps, read from a short text:
//   0.001                             the same always
//   exponential(0.1, 0.99, 0.001)     0.1 0.99^t, and the last number from where it would be passed
//   linear(0.1, 0.001, 500)           0.1 at t = 0, 0.001 from t = 500 on, a straight line between
//   piecewise(0.1, 200: 0.01, 400: 0.001)   0.1, from t = 200 on 0.01, from t = 400 on 0.001
// Workers and servers may evaluate the same text: no state, the same bits on every machine of one libm.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor {

// Immutable; safe from any thread.
class Schedule {
 public:
  Schedule() : Schedule(0.0) {}
  explicit Schedule(double value) : first_(value), last_(value) {}

  // InvalidArgument says what was expected and what came. All numbers are finite, a rate positive and not 1, a limit on
  // the side that the rate leads to, a number of steps positive, the steps of a piecewise schedule ascending.
  static absl::StatusOr<Schedule> Parse(absl::string_view text);
  // The text of the number, the same always: as people write it where that is short, and read back as it was.
  static std::string Text(double value);

  double At(uint64_t t) const;
  // Bounds of At over all t.
  double lowest() const;
  double highest() const;

 private:
  enum class Kind : uint8_t { kConstant, kExponential, kLinear, kPiecewise };

  Kind kind_ = Kind::kConstant;
  double first_ = 0;                                 // at t = 0
  double last_ = 0;                                  // where it ends
  double rate_ = 1;                                  // exponential
  uint64_t steps_ = 0;                               // linear
  std::vector<std::pair<uint64_t, double>> pieces_;  // from which t on which value, ascending
};

}  // namespace precondor
