// SPDX-License-Identifier: Apache-2.0
// Messages that arrive late, twice, out of order or not at all.
#pragma once

#include <cstdint>
#include <functional>

#include "tests/sim/event_queue.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

struct NetworkFaults {
  double drop = 0;
  double duplicate = 0;
  int64_t max_delay_us = 1;
  double straggle = 0;  // chance of a delay 50 times the usual: it comes long after everybody has moved on
};

class Network {
 public:
  Network(EventQueue& queue, Random& random, NetworkFaults faults) : queue_(queue), random_(random), faults_(faults) {}

  // Has `deliver` happen later: never, once or twice.
  void Send(const std::function<void()>& deliver) {
    if (random_.Chance(faults_.drop)) return;
    queue_.After(Delay(), deliver);
    if (random_.Chance(faults_.duplicate)) queue_.After(Delay(), deliver);
  }

 private:
  int64_t Delay() {
    const int64_t delay = 1 + static_cast<int64_t>(random_.Below(faults_.max_delay_us));
    return random_.Chance(faults_.straggle) ? 50 * delay : delay;
  }

  EventQueue& queue_;
  Random& random_;
  const NetworkFaults faults_;
};

}  // namespace precondor::sim
