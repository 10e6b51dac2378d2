// SPDX-License-Identifier: Apache-2.0
// Waiting for what other threads bring about.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace precondor {

// True once `condition` holds; false when it does not within a minute.
inline bool WaitUntil(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace precondor
