// SPDX-License-Identifier: Apache-2.0
// A process's executor whose strands run at any time the seed likes, each in its order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "server/core/api/executor.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

class SimExecutor final : public Executor {
 public:
  SimExecutor(Process& process, Random& random) : process_(process), random_(random) {}
  uint64_t NewStrand() override { return ++strands_; }
  void Post(uint64_t strand, Task task) override {
    tasks_[strand].push_back(std::move(task));
    process_.After(random_.Between(0, 200), [this, strand] {
      if (tasks_[strand].empty()) return;  // RunAll has run it
      const Task next = std::move(tasks_[strand].front());
      tasks_[strand].pop_front();
      next();
    });
  }
  // Runs now all that waits, and all that these tasks post.
  void RunAll() {
    for (auto next = tasks_.begin(); next != tasks_.end();) {
      if (next->second.empty()) {
        ++next;
        continue;
      }
      const Task task = std::move(next->second.front());
      next->second.pop_front();
      task();
      next = tasks_.begin();
    }
  }
  // No thread waits in virtual time: tasks run as its events.
  void Drain() override {}
  int parallelism() const override { return 1; }

 private:
  Process& process_;
  Random& random_;
  uint64_t strands_ = 0;
  std::map<uint64_t, std::deque<Task>> tasks_;
};

}  // namespace precondor::sim
