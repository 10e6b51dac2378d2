// SPDX-License-Identifier: Apache-2.0
// What a task (Backend::Task) has deferred.
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

namespace precondor {

// Copies of numbers, each where it stays until all are forgotten. Their memory then serves the next ones, since a task
// takes as much step by step; what is long goes back.
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
  std::deque<std::vector<T>> all_;  // a deque's elements stay where they are
  size_t used_ = 0;
};

// Copies of the numbers that operations take from their callers.
class KeptNumbers {
 public:
  // Of an operation's description (kernels/operation.h): shows it the copies.
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

// Used by the thread that runs the task; by the thread that runs a round while the task waits for it.
struct DeferredTask {
  const Backend* backend = nullptr;  // null: no task has begun
  int depth = 0;                     // tasks within tasks
  std::vector<Operation> operations;
  KeptNumbers kept;                               // which `operations` show
  std::vector<std::pair<float*, int64_t>> freed;  // memory that the operations may still use
  int64_t freed_bytes = 0;
  std::vector<const Operation*> open;  // during a round: the operations that have not run yet, in their order
  absl::Status status;                 // of the last operation, which the task waits for
  bool in_batch = false;
  absl::Status batch_status;  // the first error of what the batch has asked for

  void Defer(const Operation& operation) {
    std::visit([this](auto& kind) { kind.Describe(kind, kept); }, operations.emplace_back(operation).what);
  }
};

}  // namespace precondor
