// SPDX-License-Identifier: Apache-2.0
// Messages that arrive late, twice, out of order or not at all, over links that can be clogged one by one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "tests/sim/event_queue.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

struct NetworkFaults {
  double drop = 0;
  double duplicate = 0;
  double straggle = 0;  // chance of a delay 50 times the usual: it comes long after all ranks have moved on
};

class Network {
 public:
  Network(EventQueue& queue, Random& random, int64_t max_delay_us, NetworkFaults faults)
      : queue_(queue), random_(random), max_delay_us_(max_delay_us), faults_(faults) {}

  // Has `deliver` happen at `to` later: never, once or twice, and only in its present life. From a dead process nothing
  // comes; what it sent while it lived does.
  void Send(const Process& from, Process& to, std::function<void()> deliver);

  // One direction of a link. What is on its way waits until the link is free.
  void Clog(const Process& from, const Process& to);
  void Unclog(const Process& from, const Process& to);
  bool clogged(const Process& from, const Process& to) const { return clogged_.contains({from.id(), to.id()}); }

  // No fault from now on.
  void Heal();

 private:
  using Link = std::pair<uint32_t, uint32_t>;
  struct Waiting {
    Process* to = nullptr;
    uint64_t life = 0;
    std::function<void()> deliver;
  };
  int64_t Delay();
  void Carry(Link link, Waiting message);
  void Release(std::vector<Waiting> messages, Link link);

  EventQueue& queue_;
  Random& random_;
  const int64_t max_delay_us_;
  NetworkFaults faults_;
  std::map<Link, std::vector<Waiting>> clogged_;
};

}  // namespace precondor::sim
