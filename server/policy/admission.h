// SPDX-License-Identifier: Apache-2.0
// Whether a shard takes a session in. A pure function.
#pragma once

#include <cstdint>
#include <string>

namespace precondor {

// All in bytes, none negative.
struct AdmissionInput {
  int64_t needed = 0;    // what the session would reserve
  int64_t reserved = 0;  // what other sessions have reserved
  int64_t capacity = 0;  // what all sessions together may reserve
};

struct AdmissionDecision {
  bool admit = false;
  std::string reason;  // always with the three numbers
};

// Admits when needed + reserved <= capacity, without overflow.
AdmissionDecision DecideAdmission(const AdmissionInput& input);

}  // namespace precondor
