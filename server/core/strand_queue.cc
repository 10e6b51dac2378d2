// SPDX-License-Identifier: Apache-2.0
#include "server/core/strand_queue.h"

namespace precondor {

bool StrandQueue::Push(uint64_t strand, Task task) {
  auto [entry, fresh] = strands_.try_emplace(strand);
  entry->second.push_back(std::move(task));
  // A strand that is in the table already is queued in ready_, or Finish queues it again.
  if (fresh) ready_.push_back(strand);
  return fresh;
}

std::pair<uint64_t, StrandQueue::Task> StrandQueue::Pop() {
  const uint64_t strand = ready_.front();
  ready_.pop_front();
  std::deque<Task>& tasks = strands_.at(strand);
  std::pair<uint64_t, Task> next(strand, std::move(tasks.front()));
  tasks.pop_front();
  ++running_;
  return next;
}

bool StrandQueue::Finish(uint64_t strand) {
  --running_;
  const auto entry = strands_.find(strand);
  if (entry->second.empty()) {
    strands_.erase(entry);
    return false;
  }
  ready_.push_back(strand);
  return true;
}

}  // namespace precondor
