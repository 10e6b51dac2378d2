// SPDX-License-Identifier: Apache-2.0
// The executor of a server: a fixed number of threads that run strands.
#pragma once

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/base/mutex.h"
#include "server/core/executor.h"

namespace precondor {

// Thread-safe. Ready strands take turns, one task a turn, so that no layer starves another. The destructor runs what
// was posted and joins; nothing may be posted while it runs, but by the tasks themselves. As many threads again, of a
// lower priority, are made for the first task in the background.
class ThreadPoolExecutor final : public Executor {
 public:
  // At least one thread is made.
  explicit ThreadPoolExecutor(int threads);
  ~ThreadPoolExecutor() override;
  ThreadPoolExecutor(const ThreadPoolExecutor&) = delete;
  ThreadPoolExecutor& operator=(const ThreadPoolExecutor&) = delete;

  uint64_t NewStrand() override;
  void Post(uint64_t strand, Task task) override;
  void PostBackground(Task task) override;
  // Waits until nothing of a strand is queued or running, which is more than the interface asks for. Not from a task.
  void Drain() override;
  int parallelism() const override { return static_cast<int>(threads_.size()); }

 private:
  void Work();
  void WorkInBackground();

  Mutex mu_;
  CondVar ready_changed_;
  CondVar idle_;
  uint64_t last_strand_ ABSL_GUARDED_BY(mu_) = 0;
  // Strands with tasks queued or running; an entry goes when its queue is empty, so that the table stays small.
  absl::flat_hash_map<uint64_t, std::deque<Task>> strands_ ABSL_GUARDED_BY(mu_);
  std::deque<uint64_t> ready_ ABSL_GUARDED_BY(mu_);  // strands with a task and nobody running them
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  CondVar background_changed_;
  std::deque<Task> background_ ABSL_GUARDED_BY(mu_);
  bool background_stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> background_threads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;  // const after construction
};

}  // namespace precondor
