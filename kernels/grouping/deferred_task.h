// SPDX-License-Identifier: Apache-2.0
// The deferred operations of a task (Backend::Task).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/operation.h"

namespace precondor {

// Returns whether neither operation writes memory that the other reads or writes. Returns false if the operands'
// addresses do not show it.
bool AreIndependent(const Operation& one, const Operation& other);

// Copies of spans of numbers, each at a fixed address until clear(). clear() keeps the memory of short copies for
// reuse, because a task makes similar copies step after step; it frees long ones.
template <typename T>
class Copies {
 public:
  absl::Span<const T> Of(absl::Span<const T> numbers) {
    if (used_ == all_.size()) all_.emplace_back();
    std::vector<T>& copy = all_[used_++];
    copy.assign(numbers.begin(), numbers.end());
    return copy;
  }
  void clear() {
    constexpr size_t kLong = 1024;
    for (; used_ > 0; --used_) {
      if (all_[used_ - 1].capacity() > kLong) all_[used_ - 1] = std::vector<T>();
    }
  }

 private:
  std::deque<std::vector<T>> all_;  // a deque does not move its elements
  size_t used_ = 0;
};

// Copies of the numbers that operations get from their callers.
class KeptNumbers {
 public:
  // Visits an operation's description (kernels/operation.h): replaces its spans by spans of copies.
  void Takes(auto&... numbers) { (Keep(numbers), ...); }
  void Reads(const auto&...) {}
  void Writes(const auto&...) {}
  void clear() {
    reals_.clear();
    integers_.clear();
  }

 private:
  void Keep(absl::Span<const double>& numbers) { numbers = reals_.Of(numbers); }
  void Keep(absl::Span<const int64_t>& numbers) { numbers = integers_.Of(numbers); }

  Copies<double> reals_;
  Copies<int64_t> integers_;
};

// State of one task. Used by the thread that runs the task or, while the task waits for a round, by the thread that
// runs the round.
struct DeferredTask {
  const Backend* backend = nullptr;  // null if no task is active
  int depth = 0;                     // nesting depth of tasks
  std::vector<Operation> operations;
  KeptNumbers kept;                               // numbers that `operations` refer to
  std::vector<std::pair<float*, int64_t>> freed;  // memory freed by the task that operations may still use
  int64_t freed_bytes = 0;
  std::vector<const Operation*> open;  // during a round: the operations that have not run, in order
  absl::Status status;                 // first error of the operations that the task awaits in a round
  bool in_batch = false;
  absl::Status batch_status;  // first error of the batch's operations

  void Defer(const Operation& operation) {
    std::visit([this](auto& kind) { Describe(kind, kept); }, operations.emplace_back(operation).what);
  }
};

}  // namespace precondor
