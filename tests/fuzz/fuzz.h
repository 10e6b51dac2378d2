// SPDX-License-Identifier: Apache-2.0
// One program for each target: libFuzzer calls LLVMFuzzerTestOneInput with bytes that it changes until they reach new
// branches, and a crash, a leak or a failed PRECONDOR_CHECK is a fault. docs/develop/testing.md has how to run them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace precondor::fuzz {

// Inputs that a target's decoders accept, from which libFuzzer begins. They are written into its corpus.
std::vector<std::string> Seeds();

// Uses one input. It must end, and must not fail for any bytes.
void Run(absl::string_view input);

// The input's first byte chooses among `count` decoders, and is taken off.
inline size_t Choose(absl::string_view& input, size_t count) {
  if (input.empty()) return 0;
  const size_t chosen = static_cast<uint8_t>(input.front()) % count;
  input.remove_prefix(1);
  return chosen;
}

}  // namespace precondor::fuzz
