// SPDX-License-Identifier: Apache-2.0
// One operation's turn on a session of a coordinator: others that change it wait.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

#include "kernels/base/mutex.h"
#include "server/core/coordinator.h"

namespace precondor {

class Coordinator::Turn {
 public:
  // `create`: make a place for a name that has none. Without it has_place() may be false.
  Turn(Coordinator& coordinator, absl::string_view name, bool create) : coordinator_(coordinator), name_(name) {
    MutexLock lock(coordinator_.mu_);
    for (;;) {
      auto found = coordinator_.places_.find(name_);
      if (found == coordinator_.places_.end()) {
        if (!create) return;
        found = coordinator_.places_.emplace(name_, Place()).first;
      }
      if (!found->second.busy) {
        found->second.busy = true;
        has_place_ = true;
        state_ = found->second.state;
        return;
      }
      coordinator_.place_freed_.wait(coordinator_.mu_);
    }
  }
  ~Turn() {
    if (!has_place_) return;
    {
      MutexLock lock(coordinator_.mu_);
      auto found = coordinator_.places_.find(name_);
      found->second.busy = false;
      found->second.state = state_;
      if (state_ == nullptr) coordinator_.places_.erase(found);
    }
    coordinator_.place_freed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Null: there is no such session.
  const std::shared_ptr<CoordinatorSession>& state() const { return state_; }
  // Takes effect when the turn ends.
  void SetState(std::shared_ptr<CoordinatorSession> state) { state_ = std::move(state); }

 private:
  Coordinator& coordinator_;
  const std::string name_;
  bool has_place_ = false;
  std::shared_ptr<CoordinatorSession> state_;
};

}  // namespace precondor
