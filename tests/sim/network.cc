// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/network.h"

namespace precondor::sim {

int64_t Network::Delay() {
  const int64_t delay = random_.Between(1, max_delay_us_);
  return random_.Chance(faults_.straggle) ? 50 * delay : delay;
}

void Network::Send(const Process& from, Process& to, std::function<void()> deliver) {
  if (!from.up() || !to.up() || random_.Chance(faults_.drop)) return;
  const Link link{from.id(), to.id()};
  const Waiting message{.to = &to, .life = to.life(), .deliver = std::move(deliver)};
  if (random_.Chance(faults_.duplicate)) Carry(link, message);
  Carry(link, message);
}

void Network::Carry(Link link, Waiting message) {
  queue_.After(Delay(), [this, link, message = std::move(message)] {
    if (auto found = clogged_.find(link); found != clogged_.end()) {
      found->second.push_back(message);
    } else {
      message.to->Run(message.life, message.deliver);
    }
  });
}

void Network::Clog(const Process& from, const Process& to) { clogged_.try_emplace({from.id(), to.id()}); }

void Network::Unclog(const Process& from, const Process& to) {
  const Link link{from.id(), to.id()};
  if (auto found = clogged_.extract(link); !found.empty()) Release(std::move(found.mapped()), link);
}

void Network::Release(std::vector<Waiting> messages, Link link) {
  for (Waiting& message : messages) Carry(link, std::move(message));
}

void Network::Heal() {
  faults_ = {};
  for (auto& [link, messages] : std::exchange(clogged_, {})) Release(std::move(messages), link);
}

}  // namespace precondor::sim
