// SPDX-License-Identifier: Apache-2.0
// Visits all states of a small world, breadth first, each once. No state breaks an invariant, and from each state an
// end can still be reached without another fault.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace precondor::explore {

// `Explorer` has the functions of LayerExplorer that are called here, for its own `World` and `Move`.
template <typename Explorer>
class Search {
 public:
  Search(const typename Explorer::Limits& limits, typename Explorer::Bug bug, uint64_t max_states)
      : name_(limits.name), explorer_(limits, bug), max_states_(max_states) {}

  // 0: no state is wrong; 1: one is, and the way there has been printed; 3: too many states.
  int Run() {
    const auto began = std::chrono::steady_clock::now();
    std::vector<std::pair<uint64_t, World>> level;
    level.emplace_back(Visit(explorer_.Start(), 0, {}), explorer_.Start());
    if (explorer_.IsDone(level[0].second)) ends_.push_back(level[0].first);
    while (!level.empty()) {
      std::vector<std::pair<uint64_t, World>> next;
      for (auto& [from, world] : level) {
        const std::vector<Move> all_moves = explorer_.MovesOf(world);
        for (const Move& move : all_moves) {
          World after = &move == &all_moves.back() ? std::move(world) : world;
          explorer_.Do(move, after, nullptr);
          ++moves_;
          const uint64_t print = explorer_.Fingerprint(after);
          const bool is_new = !visited_.contains(print);
          if (is_new) Visit(after, from, move);
          if (!move.is_fault()) visited_.at(print).before.push_back(from);
          if (!after.violation.empty()) return Fail(print, after.violation);
          if (!is_new) continue;
          if (explorer_.IsDone(after)) ends_.push_back(print);
          next.emplace_back(print, std::move(after));
          if (visited_.size() > max_states_) return TooMany();
        }
      }
      level = std::move(next);
      ++depth_;
    }
    MarkThoseThatCanEnd();
    for (const uint64_t print : order_) {
      if (!visited_.at(print).can_end) return Fail(print, "I7: from here no end can be reached any more");
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("%-28s %9zu states %10llu moves  depth %3d  %6.1f s\n", name_.c_str(), visited_.size(),
                static_cast<unsigned long long>(moves_), depth_, took.count());
    return 0;
  }

 private:
  using World = typename Explorer::World;
  using Move = typename Explorer::Move;
  struct Visited {
    uint64_t parent = 0;
    Move move = {};
    bool can_end = false;
    std::vector<uint64_t> before = {};  // from which a move that is no fault leads here
  };

  uint64_t Visit(const World& world, uint64_t parent, const Move& move) {
    const uint64_t print = explorer_.Fingerprint(world);
    visited_[print] = {.parent = parent, .move = move};
    order_.push_back(print);
    return print;
  }

  void MarkThoseThatCanEnd() {
    std::vector<uint64_t> open = ends_;
    while (!open.empty()) {
      Visited& visited = visited_.at(open.back());
      open.pop_back();
      if (std::exchange(visited.can_end, true)) continue;
      open.insert(open.end(), visited.before.begin(), visited.before.end());
    }
  }

  int Fail(uint64_t print, const std::string& violation) {
    std::vector<Move> moves;
    for (uint64_t at = print; at != order_.front(); at = visited_.at(at).parent) moves.push_back(visited_.at(at).move);
    World world = explorer_.Start();
    std::vector<std::string> story;
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) explorer_.Do(*move, world, &story);
    std::printf("%s, %zu states: %s\n", name_.c_str(), visited_.size(), violation.c_str());
    for (const std::string& line : story) std::printf("  %s\n", line.c_str());
    return 1;
  }

  int TooMany() const {
    std::printf("%s: more than %llu states; not explored\n", name_.c_str(),
                static_cast<unsigned long long>(max_states_));
    return 3;
  }

  const std::string name_;
  const Explorer explorer_;
  const uint64_t max_states_;
  std::unordered_map<uint64_t, Visited> visited_;
  std::vector<uint64_t> order_;
  std::vector<uint64_t> ends_;
  uint64_t moves_ = 0;
  int depth_ = 0;
};

}  // namespace precondor::explore
