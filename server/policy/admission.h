// SPDX-License-Identifier: Apache-2.0
// Decides whether a shard admits a session. A pure function.
#pragma once

#include <cstdint>
#include <string>

namespace precondor {

// All numbers are in bytes and not negative.
struct AdmissionInput {
  int64_t needed = 0;    // bytes that the session would reserve
  int64_t reserved = 0;  // bytes that other sessions have reserved
  int64_t capacity = 0;  // bytes that all sessions together may reserve
};

struct AdmissionDecision {
  bool admit = false;
  std::string reason;  // always contains the three numbers
};

// Admits the session if needed + reserved <= capacity, without overflow.
AdmissionDecision DecideAdmission(const AdmissionInput& input);

}  // namespace precondor
