// SPDX-License-Identifier: Apache-2.0
// A process of the simulated cluster: it runs, stands still or is dead, and may live again.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>

#include "tests/sim/event_queue.h"

namespace precondor::sim {

// Outlives the queue's events.
class Process {
 public:
  Process(EventQueue& queue, uint32_t id, std::string name) : queue_(queue), id_(id), name_(std::move(name)) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  uint32_t id() const { return id_; }
  const std::string& name() const { return name_; }
  uint64_t life() const { return life_; }
  bool up() const { return up_; }
  bool running() const { return up_ && !paused_; }

  void Start() {
    up_ = true;
    paused_ = false;
    ++life_;
  }
  // Its pending work is lost.
  void Kill() {
    up_ = false;
    held_.clear();
  }
  void Pause() { paused_ = up_; }
  void Resume() {
    paused_ = false;
    for (std::function<void()>& event : std::exchange(held_, {})) After(0, std::move(event));
  }

  // Happens in this life or not at all; while it stands still, when it goes on.
  void After(int64_t delay_us, std::function<void()> event) {
    queue_.After(delay_us, [this, life = life_, event = std::move(event)] { Run(life, event); });
  }
  // Now, if this is still the life.
  void Run(uint64_t life, const std::function<void()>& event) {
    if (!up_ || life != life_) return;
    if (paused_) {
      held_.push_back(event);
    } else {
      event();
    }
  }

 private:
  EventQueue& queue_;
  const uint32_t id_;
  const std::string name_;
  uint64_t life_ = 0;
  bool up_ = false;
  bool paused_ = false;
  std::deque<std::function<void()>> held_;
};

}  // namespace precondor::sim
