// SPDX-License-Identifier: Apache-2.0
// A number that is a pure function of a step count, read from a short text:
//   0.001                             constant
//   exponential(0.1, 0.99, 0.001)     0.1 0.99^t; 0.001, the limit, from the step on at which it would be passed
//   linear(0.1, 0.001, 500)           0.1 at t = 0, 0.001 from t = 500 on, a straight line between
//   piecewise(0.1, 200: 0.01, 400: 0.001)   0.1, from t = 200 on 0.01, from t = 400 on 0.001
// Workers and servers may evaluate one text separately: it has no state, and one libm gives equal bits on every
// machine.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace precondor {

// A parsed schedule. Immutable; safe from any thread.
class Schedule {
 public:
  Schedule() : Schedule(0.0) {}
  explicit Schedule(double value) : first_(value), last_(value) {}

  // Returns InvalidArgument, with the expected form and the text it got, unless all numbers are finite, a rate is
  // positive and not 1, a limit lies on the side that the rate leads to, a number of steps is positive, and the steps
  // of a piecewise schedule ascend.
  static absl::StatusOr<Schedule> Parse(absl::string_view text);
  // Returns the text of a constant schedule: plain decimal if that is short, otherwise the shortest form. Parse reads
  // back exactly `value`.
  static std::string Text(double value);

  double At(uint64_t t) const;
  // Bounds of At(t) over all t.
  double lowest() const;
  double highest() const;

 private:
  enum class Kind : uint8_t { kConstant, kExponential, kLinear, kPiecewise };

  Kind kind_ = Kind::kConstant;
  double first_ = 0;                                 // value at t = 0
  double last_ = 0;                                  // final value or limit
  double rate_ = 1;                                  // exponential: factor per step
  uint64_t steps_ = 0;                               // linear: length in steps
  std::vector<std::pair<uint64_t, double>> pieces_;  // piecewise: (first t, value), ascending in t
};

}  // namespace precondor
