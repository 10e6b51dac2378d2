// SPDX-License-Identifier: Apache-2.0
#include "server/core/executors/strand_queue.h"

#include <algorithm>

namespace precondor {

uint64_t StrandQueue::NewStrand(uint64_t session, int at_once) {
  const uint64_t strand = (session % (1 << 24) << kNumberBits) + ++last_strand_;
  if (at_once < max_tasks_per_session_) {
    limits_.insert_or_assign(SessionOf(strand), std::max(at_once, 1));
  } else {
    limits_.erase(SessionOf(strand));
  }
  return strand;
}

bool StrandQueue::Push(uint64_t strand, Task task) {
  auto [entry, fresh] = strands_.try_emplace(strand);
  entry->second.push_back(std::move(task));
  // A strand that is in the table already is ready, or Finish makes it so.
  if (fresh) MakeReady(strand);
  return fresh;
}

void StrandQueue::MakeReady(uint64_t strand) {
  const auto [entry, fresh] = sessions_.try_emplace(SessionOf(strand));
  Session& session = entry->second;
  if (fresh) {
    const auto limit = limits_.find(SessionOf(strand));
    session.at_once = limit == limits_.end() ? max_tasks_per_session_ : limit->second;
  }
  if (session.ready.empty()) turns_.push_back(SessionOf(strand));
  session.ready.push_back(strand);
}

size_t StrandQueue::FirstTurn(int running) const {
  size_t turn = 0;
  const auto is_busy = [&](const Session& session) { return session.running >= std::min(running, session.at_once); };
  while (turn < turns_.size() && is_busy(sessions_.at(turns_[turn]))) ++turn;
  return turn;
}

StrandQueue::Next StrandQueue::PopOf(int running) {
  const auto turn = turns_.begin() + static_cast<std::ptrdiff_t>(FirstTurn(running));
  const uint64_t id = *turn;
  turns_.erase(turn);
  Session& session = sessions_.at(id);
  const uint64_t strand = session.ready.front();
  session.ready.pop_front();
  if (!session.ready.empty()) turns_.push_back(id);
  ++session.running;
  ++running_;
  std::deque<Task>& tasks = strands_.at(strand);
  Next next{strand, std::move(tasks.front())};
  tasks.pop_front();
  return next;
}

bool StrandQueue::Finish(uint64_t strand) {
  --running_;
  const auto session = sessions_.find(SessionOf(strand));
  --session->second.running;
  const auto entry = strands_.find(strand);
  if (!entry->second.empty()) {
    MakeReady(strand);
    return true;
  }
  strands_.erase(entry);
  if (session->second.running == 0 && session->second.ready.empty()) sessions_.erase(session);
  return false;
}

}  // namespace precondor
