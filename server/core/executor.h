// SPDX-License-Identifier: Apache-2.0
// Where core's arithmetic runs. A server has a pool; unit tests and the simulator run on their own thread.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace precondor {

// Thread-safe. Tasks of one strand run one at a time, in the order of Post; strands run beside each other.
// Strand numbers come from NewStrand and are never reused. Post is never called under a lock of core.
class Executor {
 public:
  using Task = std::function<void()>;
  virtual ~Executor() = default;
  virtual uint64_t NewStrand() = 0;
  // Of a session: where there are several, an executor is to let none of them wait for the work of the others.
  virtual uint64_t NewStrandOf([[maybe_unused]] uint64_t session) { return NewStrand(); }
  virtual void Post(uint64_t strand, Task task) = 0;
  // For work that no thread waits for yet: in any order, beside the strands and after them where both want a processor.
  // Such a task posts nothing.
  virtual void PostBackground(Task task) { Post(NewStrand(), std::move(task)); }
  // Returns when every task of a strand posted before the call has run.
  virtual void Drain() = 0;
  // Tasks of one session's strands that may run at the same time, at least 1, and as many in the background; each
  // session reserves its scratch memory that many times.
  virtual int parallelism() const = 0;
};

}  // namespace precondor
