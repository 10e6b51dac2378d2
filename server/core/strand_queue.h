// SPDX-License-Identifier: Apache-2.0
// Which task of an executor's strands runs next.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"

#include "server/core/executor.h"

namespace precondor {

// Not thread-safe: the executor guards it. Ready strands take turns, one task a turn, so that no layer starves another.
class StrandQueue {
 public:
  using Task = Executor::Task;

  uint64_t NewStrand() { return ++last_strand_; }
  // True: the strand has become ready. Otherwise it is ready already, or the task that it runs makes it ready.
  bool Push(uint64_t strand, Task task);
  // The first task of the strand that has been ready for longest. The strand is not ready again before Finish, with
  // which the caller says that the task has run. Precondition: has_ready().
  std::pair<uint64_t, Task> Pop();
  // True: the strand has become ready again.
  bool Finish(uint64_t strand);

  bool has_ready() const { return !ready_.empty(); }
  // Tasks between Pop and Finish.
  int running() const { return running_; }
  // Nothing is queued or running.
  bool empty() const { return strands_.empty(); }

 private:
  uint64_t last_strand_ = 0;
  // Strands with tasks queued or running; an entry goes when its queue is empty, so that the table stays small.
  absl::flat_hash_map<uint64_t, std::deque<Task>> strands_;
  std::deque<uint64_t> ready_;  // strands with a task that no thread runs
  int running_ = 0;
};

}  // namespace precondor
