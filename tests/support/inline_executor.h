// SPDX-License-Identifier: Apache-2.0
// An executor without threads.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "server/core/api/executor.h"

namespace precondor {

// Runs a task inside Post, on the caller's thread. A task that a running task posts waits until the running one
// returns, which keeps the order of strands. For use by one thread at a time.
class InlineExecutor final : public Executor {
 public:
  uint64_t NewStrand() override { return ++strands_; }
  void Post(uint64_t, Task task) override {
    tasks_.push_back(std::move(task));
    if (!running_) Drain();
  }
  void Drain() override {
    running_ = true;
    while (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
    running_ = false;
  }
  int parallelism() const override { return 1; }

 private:
  uint64_t strands_ = 0;
  bool running_ = false;
  std::deque<Task> tasks_;
};

}  // namespace precondor
