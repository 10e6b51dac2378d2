// SPDX-License-Identifier: Apache-2.0
// A pool of fibers, so that an executor reuses their stacks.
#pragma once

#include <memory>
#include <vector>

#include "kernels/base/fiber.h"

namespace precondor {

// Keeps fibers for reuse. Not thread-safe: the executor guards it. Precondition of the destructor: all fibers have
// ended.
class FiberPool {
 public:
  // Returns a fiber whose function has ended, or null if the system has no memory for another stack. `home` is as in
  // Fiber::Make.
  Fiber* Take(FiberScheduler& home) {
    if (idle_.empty()) {
      std::unique_ptr<Fiber> made = Fiber::Make(home);
      if (made == nullptr) return nullptr;
      return fibers_.emplace_back(std::move(made)).get();
    }
    Fiber* const fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }
  void Return(Fiber& fiber) { idle_.push_back(&fiber); }

 private:
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

}  // namespace precondor
