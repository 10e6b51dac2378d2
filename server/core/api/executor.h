// SPDX-License-Identifier: Apache-2.0
// The interface of executors, which run core's arithmetic. A server has a thread pool; unit tests and the simulator run
// tasks on their own thread.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace precondor {

// Runs tasks of strands. Tasks of one strand run one at a time, in the order of Post; strands run concurrently. Strand
// numbers come from NewStrand and are never reused. Thread-safe. Post is never called under a lock of core.
class Executor {
 public:
  using Task = std::function<void()>;
  virtual ~Executor() = default;
  virtual uint64_t NewStrand() = 0;
  // Returns a new strand of `session`, of whose strands at most `at_once` run at once, at most parallelism() in any
  // case. All strands of a session have the same limit. An executor should not let a session wait for the work of other
  // sessions.
  virtual uint64_t NewStrandOf([[maybe_unused]] uint64_t session, [[maybe_unused]] int at_once) { return NewStrand(); }
  virtual void Post(uint64_t strand, Task task) = 0;
  // Posts work that no thread waits for yet. Such tasks run in any order, beside the strands, which have priority for
  // processors. Precondition: the task posts nothing.
  virtual void PostBackground(Task task) { Post(NewStrand(), std::move(task)); }
  // Returns when every task of a strand posted before the call has run.
  virtual void Drain() = 0;
  // Returns how many tasks of one session's strands may run at once, at least 1; as many may run in the background.
  virtual int parallelism() const = 0;
};

}  // namespace precondor
