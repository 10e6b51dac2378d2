// SPDX-License-Identifier: Apache-2.0
// An executor whose strands run at any time the seed likes, each in its order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "server/core/executor.h"
#include "tests/sim/event_queue.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

class SimExecutor final : public Executor {
 public:
  SimExecutor(EventQueue& queue, Random& random) : queue_(queue), random_(random) {}
  uint64_t NewStrand() override { return ++strands_; }
  void Post(uint64_t strand, Task task) override {
    tasks_[strand].push_back(std::move(task));
    queue_.After(static_cast<int64_t>(random_.Below(200)), [this, strand] {
      Task next = std::move(tasks_[strand].front());
      tasks_[strand].pop_front();
      next();
    });
  }
  void Drain() override {
    while (queue_.RunOne()) {
    }
  }
  int parallelism() const override { return 1; }

 private:
  EventQueue& queue_;
  Random& random_;
  uint64_t strands_ = 0;
  std::map<uint64_t, std::deque<Task>> tasks_;
};

}  // namespace precondor::sim
