// SPDX-License-Identifier: Apache-2.0
// Decides which task of an executor's strands runs next.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_map.h"

#include "server/core/api/executor.h"

namespace precondor {

// Queues the tasks of strands. Sessions with ready strands take turns, and the ready strands of a session take turns
// within the session's, one task a turn: no session starves another, and no layer another. Not thread-safe: the
// executor guards it.
class StrandQueue {
 public:
  using Task = Executor::Task;
  struct Next {
    uint64_t strand = 0;
    Task task;
  };

  // `max_tasks_per_session` is the number of tasks of one session that may run at once.
  explicit StrandQueue(int max_tasks_per_session) : max_tasks_per_session_(max_tasks_per_session) {}

  // Returns a new strand of a session with at most `at_once` tasks running. Its number includes the session's: sessions
  // whose ids are equal in the last 24 bits share turns and the last one's limit.
  uint64_t NewStrand(uint64_t session, int at_once);
  // Queues a task. Returns true if this makes the strand ready. Otherwise it is ready already, or Finish makes it ready
  // after its running task.
  bool Push(uint64_t strand, Task task);
  // Removes the first task of the strand that has been ready for longest, of the session whose turn it is. The strand
  // is not ready again before the caller has run the task and called Finish. Precondition: has_next().
  Next Pop() { return PopOf(max_tasks_per_session_); }
  // Like Pop, but only among sessions that have no task running. Precondition: has_next_of_idle().
  Next PopOfIdle() { return PopOf(1); }
  // Ends the strand's task that Pop returned. Returns true if the strand is ready again.
  bool Finish(uint64_t strand);

  bool has_next() const { return FirstTurn(max_tasks_per_session_) < turns_.size(); }
  bool has_next_of_idle() const { return FirstTurn(1) < turns_.size(); }
  // Number of tasks between Pop and Finish.
  int running() const { return running_; }
  // Returns true if no task is queued or running.
  bool empty() const { return strands_.empty(); }

 private:
  static constexpr int kNumberBits = 40;
  struct Session {
    std::deque<uint64_t> ready;  // strands with a task that no thread runs
    int running = 0;
    int at_once = 0;
  };

  static uint64_t SessionOf(uint64_t strand) { return strand >> kNumberBits; }
  void MakeReady(uint64_t strand);
  // Returns the index in turns_ of the first session with fewer than `running` tasks running, or turns_.size() if there
  // is none.
  size_t FirstTurn(int running) const;
  Next PopOf(int running);

  const int max_tasks_per_session_;
  uint64_t last_strand_ = 0;
  // Strands and sessions with tasks queued or running. An entry is removed with its last task, so that the tables stay
  // small.
  absl::flat_hash_map<uint64_t, std::deque<Task>> strands_;
  absl::flat_hash_map<uint64_t, Session> sessions_;
  std::deque<uint64_t> turns_;                 // sessions with ready strands
  absl::flat_hash_map<uint64_t, int> limits_;  // of sessions with less than max_tasks_per_session_
  int running_ = 0;
};

}  // namespace precondor
