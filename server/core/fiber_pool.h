// SPDX-License-Identifier: Apache-2.0
// Stacks that an executor uses again.
#pragma once

#include <memory>
#include <vector>

#include "kernels/base/fiber.h"

namespace precondor {

// Not thread-safe: the executor guards it. All fibers have ended when it is destroyed.
class FiberPool {
 public:
  // A fiber whose function has ended. Null where the system has no memory for another stack. `home`: see Fiber::Make.
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
