// SPDX-License-Identifier: Apache-2.0
// Goes through all orders of events of small worlds, breadth first: no state breaks an invariant, and from each state
// the job can still come to its end without another fault. docs/develop/testing.md says what a world is.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

#include "tests/explore/layer_world.h"

namespace precondor::explore {
namespace {

constexpr absl::string_view kUsage =
    "usage: explore_test [--world=NAME] [--large] [--max-states=N] [--bug=NAME]\n"
    "  --world       worlds whose name contains this; default: all\n"
    "  --large       the worlds that take an hour, in place of those of CI\n"
    "  --max-states  stop a world here, with exit status 3; default 20,000,000\n"
    "  --bug         plants forgets_rank, forgets_kept, forgets_to_begin, forgets_begin, loses_update or "
    "answers_first; a failure is then expected\n"
    "example: explore_test --world=replay --bug=forgets_rank\n";

// Names: exchange, ranks x steps, faults.
std::vector<WorldLimits> Worlds(bool large) {
  using enum ExchangeMode;
  std::vector<WorldLimits> worlds;
  const auto add = [&worlds, large](WorldLimits limits) {
    static const std::unordered_map<int, const char*> kNames = {{static_cast<int>(kDirect), "direct"},
                                                                {static_cast<int>(kDelegate), "delegate"},
                                                                {static_cast<int>(kReplay), "replay"},
                                                                {static_cast<int>(kSharded), "sharded"}};
    // Several times as many states.
    limits.splits_requests = large || limits.exchange == kDelegate || limits.steps > 2 ||
                             (limits.exchange == kReplay && limits.shard_crashes > 0);
    limits.name = absl::StrCat(limits.learns ? "learns_" : "", kNames.at(static_cast<int>(limits.exchange)), "_",
                               limits.ranks, "x", limits.steps, limits.logs_gradients ? "" : "_unlogged",
                               limits.shard_crashes > 0 ? (limits.loses_log ? "_machine" : "_shard") : "",
                               limits.shard_crashes > 1 ? "2" : "", limits.rank_crashes > 0 ? "_rank" : "",
                               limits.broken_streams > 0 ? "_stream" : "");
    worlds.push_back(limits);
  };
  for (const ExchangeMode exchange : {kDirect, kDelegate, kReplay, kSharded}) {
    const WorldLimits of{.exchange = exchange};
    WorldLimits limits = of;
    limits.steps = 3;
    add(limits);
    limits.broken_streams = 1;
    add(limits);
    limits = of;
    limits.shard_crashes = 1;
    add(limits);
    limits.loses_log = true;
    add(limits);
    limits = of;
    limits.rank_crashes = 1;
    limits.broken_streams = 1;
    add(limits);
    if (large || exchange == kDelegate) {
      limits.broken_streams = 0;
      limits.shard_crashes = 1;
      limits.loses_log = true;
      add(limits);
    }
    if (!large) continue;
    limits = of;
    limits.shard_crashes = 1;
    limits.loses_log = true;
    limits.broken_streams = 1;
    add(limits);
    limits.broken_streams = 0;
    limits.steps = 3;
    add(limits);
    limits = of;
    limits.ranks = 3;
    limits.broken_streams = 1;
    add(limits);
  }
  for (const ExchangeMode exchange : {kDirect, kDelegate, kSharded}) {
    WorldLimits limits{.exchange = exchange, .steps = 3, .broken_streams = 1, .learns = true};
    add(limits);
    for (const bool logs_gradients : {true, false}) {
      limits = {.exchange = exchange, .steps = 3, .shard_crashes = 1, .learns = true, .logs_gradients = logs_gradients};
      add(limits);
      limits.loses_log = true;
      if (large || !logs_gradients) add(limits);
      limits.steps = large ? 3 : 2;
      limits.rank_crashes = 1;
      add(limits);
      limits.rank_crashes = 0;
      limits.broken_streams = 1;
      add(limits);
      limits.broken_streams = 0;
      limits.shard_crashes = 2;
      if (large || !logs_gradients) add(limits);
      if (!large) continue;
      limits.shard_crashes = 1;
      limits.ranks = 3;
      add(limits);
    }
  }
  return worlds;
}

struct Visited {
  uint64_t parent = 0;
  Move move = {};
  bool can_end = false;
  std::vector<uint64_t> before = {};  // from which a move that is no fault leads here
};

class Search {
 public:
  Search(const WorldLimits& limits, PlantedBug bug, uint64_t max_states)
      : limits_(limits), explorer_(limits, bug), max_states_(max_states) {}

  // 0: no state is wrong; 1: one is, and the way there has been printed; 3: too many states.
  int Run() {
    const auto began = std::chrono::steady_clock::now();
    std::vector<std::pair<uint64_t, LayerWorld>> level;
    level.emplace_back(Visit(explorer_.Start(), 0, {}), explorer_.Start());
    while (!level.empty()) {
      std::vector<std::pair<uint64_t, LayerWorld>> next;
      for (const auto& [from, world] : level) {
        for (const Move& move : explorer_.MovesOf(world)) {
          LayerWorld after = world;
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
      if (!visited_.at(print).can_end) return Fail(print, "I7: from here the job cannot end any more");
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("%-28s %9zu states %10llu moves  depth %3d  %6.1f s\n", limits_.name.c_str(), visited_.size(),
                static_cast<unsigned long long>(moves_), depth_, took.count());
    return 0;
  }

 private:
  uint64_t Visit(const LayerWorld& world, uint64_t parent, const Move& move) {
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
    LayerWorld world = explorer_.Start();
    std::vector<std::string> story;
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) explorer_.Do(*move, world, &story);
    std::printf("%s, %zu states: %s\n", limits_.name.c_str(), visited_.size(), violation.c_str());
    for (const std::string& line : story) std::printf("  %s\n", line.c_str());
    return 1;
  }

  int TooMany() const {
    std::printf("%s: more than %llu states; not explored\n", limits_.name.c_str(),
                static_cast<unsigned long long>(max_states_));
    return 3;
  }

  const WorldLimits limits_;
  const LayerExplorer explorer_;
  const uint64_t max_states_;
  std::unordered_map<uint64_t, Visited> visited_;
  std::vector<uint64_t> order_;
  std::vector<uint64_t> ends_;
  uint64_t moves_ = 0;
  int depth_ = 0;
};

int Main(int argc, char** argv) {
  std::string only;
  bool large = false;
  uint64_t max_states = 20'000'000;
  PlantedBug bug = PlantedBug::kNone;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    bool known = true;
    if (argument == "--large") {
      large = true;
    } else if (argument == "--help") {
      std::fputs(kUsage.data(), stdout);
      return 0;
    } else if (absl::ConsumePrefix(&argument, "--world=")) {
      only = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--max-states=")) {
      known = absl::SimpleAtoi(argument, &max_states);
    } else if (absl::ConsumePrefix(&argument, "--bug=")) {
      bug = argument == "forgets_rank"       ? PlantedBug::kForgetsRank
            : argument == "forgets_kept"     ? PlantedBug::kForgetsKept
            : argument == "forgets_to_begin" ? PlantedBug::kForgetsToBegin
            : argument == "forgets_begin"    ? PlantedBug::kForgetsBegin
            : argument == "loses_update"     ? PlantedBug::kLosesUpdate
            : argument == "answers_first"    ? PlantedBug::kAnswersFirst
                                             : PlantedBug::kNone;
      known = bug != PlantedBug::kNone;
    } else {
      known = false;
    }
    if (known) continue;
    std::fputs(kUsage.data(), stderr);
    return 2;
  }
  int worst = 0;
  for (const WorldLimits& limits : Worlds(large)) {
    if (!absl::StrContains(limits.name, only)) continue;
    worst = std::max(worst, Search(limits, bug, max_states).Run());
    std::fflush(stdout);
    if (worst == 1 && bug != PlantedBug::kNone) return 0;
  }
  return bug != PlantedBug::kNone ? 1 : worst;
}

}  // namespace
}  // namespace precondor::explore

int main(int argc, char** argv) { return precondor::explore::Main(argc, argv); }
