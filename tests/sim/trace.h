// SPDX-License-Identifier: Apache-2.0
// The last things that happened. Off in ordinary runs: a run that fails is run again with it on, as it is a function of
// its seed.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "tests/sim/event_queue.h"

namespace precondor::sim {

class Trace {
 public:
  // Keeps the last `lines`; 0: nothing.
  Trace(const EventQueue& queue, size_t lines) : queue_(queue), capacity_(lines) {}

  // `text()` is asked for only when the line is kept.
  template <typename Text>
  void Note(Text&& text) {
    if (capacity_ == 0) return;
    if (lines_.size() == capacity_) lines_.pop_front();
    lines_.push_back(std::to_string(queue_.now_us()) + " us  " + std::forward<Text>(text)());
  }
  std::string Tail() const {
    std::string text;
    for (const std::string& line : lines_) text += line + "\n";
    return text;
  }

 private:
  const EventQueue& queue_;
  const size_t capacity_;
  std::deque<std::string> lines_;
};

}  // namespace precondor::sim
