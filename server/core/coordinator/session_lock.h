// SPDX-License-Identifier: Apache-2.0
// Exclusive access of one operation to a session of a coordinator. Other operations that change the session wait.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/coordinator/coordinator.h"

namespace precondor {

class Coordinator::SessionLock {
 public:
  // Waits for the entry. If the name has no entry, makes one if `create`; otherwise state() is null and nothing is
  // locked.
  SessionLock(Coordinator& coordinator, absl::string_view name, bool create) : coordinator_(coordinator), name_(name) {
    MutexLock lock(coordinator_.mu_);
    for (;;) {
      SessionEntry* entry = coordinator_.sessions_.FindEntry(name_);
      if (entry == nullptr) {
        if (!create) return;
        entry = &coordinator_.sessions_.MakeEntry(name_);
      }
      if (!entry->busy) {
        entry->busy = true;
        has_entry_ = true;
        state_ = entry->state;
        return;
      }
      coordinator_.entry_freed_.wait(coordinator_.mu_);
    }
  }
  ~SessionLock() {
    if (!has_entry_) return;
    {
      MutexLock lock(coordinator_.mu_);
      coordinator_.sessions_.FreeEntry(name_, state_);
    }
    coordinator_.entry_freed_.notify_all();
  }
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;

  // Returns null if there is no such session.
  const std::shared_ptr<CoordinatorSession>& state() const { return state_; }
  // Sets the entry's session when the lock is released.
  void SetState(std::shared_ptr<CoordinatorSession> state) { state_ = std::move(state); }

 private:
  Coordinator& coordinator_;
  const std::string name_;
  bool has_entry_ = false;
  std::shared_ptr<CoordinatorSession> state_;
};

}  // namespace precondor
