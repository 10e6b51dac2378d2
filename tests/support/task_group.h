// SPDX-License-Identifier: Apache-2.0
// Tasks of a backend (Backend::Task) that come to its thread together, so that a test can count what they have in
// common.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <latch>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"

#include "kernels/backend.h"
#include "kernels/base/check.h"
#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"

namespace precondor {

// One thread at a time.
class TaskGroup final : private FiberScheduler {
 public:
  explicit TaskGroup(Backend& backend) : backend_(backend) {}

  // work(0) ... work(count - 1), each in a task on a fiber of its own. Returns when all have ended. No task goes on
  // before all have begun.
  void Run(int count, absl::FunctionRef<void(int)> work) {
    std::latch all_have_come(1);
    int left = 0;
    if (backend_.runs_tasks_together()) {  // a first task keeps the backend's thread
      Start(count, left, [&] {
        Backend::Task task(backend_);
        all_have_come.wait();
      });
    }
    for (int i = 0; i < count; ++i) {
      Start(i, left, [this, &work, i] {
        Backend::Task task(backend_);
        work(i);
      });
    }
    all_have_come.count_down();
    Await(left);
  }
  // The same, but `work` itself begins tasks.
  void RunWithoutTasks(int count, absl::FunctionRef<void(int)> work) {
    int left = 0;
    for (int i = 0; i < count; ++i) Start(i, left, [&work, i] { work(i); });
    Await(left);
  }

 private:
  void Resume(Fiber& fiber) override {
    MutexLock lock(mu_);
    left_driver_.push_back(&fiber);
    changed_.notify_one();
  }
  // `left`: fibers that have not ended.
  void Start(int fiber, int& left, std::function<void()> function) {
    const auto at = static_cast<size_t>(fiber);
    while (fibers_.size() <= at) {
      fibers_.push_back(Fiber::Make(*this));
      PRECONDOR_CHECK(fibers_.back() != nullptr);
    }
    ++left;
    fibers_[at]->Set(std::move(function), at);
    if (fibers_[at]->Run() == Fiber::Outcome::kEnded) --left;
  }
  void Await(int left) {
    while (left > 0) {
      if (Next().Run() == Fiber::Outcome::kEnded) --left;
    }
  }
  Fiber& Next() {
    MutexLock lock(mu_);
    while (left_driver_.empty()) changed_.wait(mu_);
    Fiber& fiber = *left_driver_.front();
    left_driver_.pop_front();
    return fiber;
  }

  Backend& backend_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Mutex mu_;
  CondVar changed_;
  std::deque<Fiber*> left_driver_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
