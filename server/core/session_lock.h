// SPDX-License-Identifier: Apache-2.0
// One operation's hold on a session of a coordinator: others that change the session wait.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/coordinator.h"

namespace precondor {

class Coordinator::SessionLock {
 public:
  // `create`: make an entry for a name that has none. Without it has_entry() may be false.
  SessionLock(Coordinator& coordinator, absl::string_view name, bool create) : coordinator_(coordinator), name_(name) {
    MutexLock lock(coordinator_.mu_);
    for (;;) {
      auto found = coordinator_.entries_.find(name_);
      if (found == coordinator_.entries_.end()) {
        if (!create) return;
        found = coordinator_.entries_.emplace(name_, SessionEntry()).first;
      }
      if (!found->second.busy) {
        found->second.busy = true;
        has_entry_ = true;
        state_ = found->second.state;
        return;
      }
      coordinator_.entry_freed_.wait(coordinator_.mu_);
    }
  }
  ~SessionLock() {
    if (!has_entry_) return;
    {
      MutexLock lock(coordinator_.mu_);
      auto found = coordinator_.entries_.find(name_);
      found->second.busy = false;
      found->second.state = state_;
      if (state_ == nullptr) coordinator_.entries_.erase(found);
    }
    coordinator_.entry_freed_.notify_all();
  }
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;

  // Null: there is no such session.
  const std::shared_ptr<CoordinatorSession>& state() const { return state_; }
  // Takes effect when the lock is given up.
  void SetState(std::shared_ptr<CoordinatorSession> state) { state_ = std::move(state); }

 private:
  Coordinator& coordinator_;
  const std::string name_;
  bool has_entry_ = false;
  std::shared_ptr<CoordinatorSession> state_;
};

}  // namespace precondor
