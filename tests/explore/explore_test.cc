// SPDX-License-Identifier: Apache-2.0
// Goes through all orders of events of small worlds. docs/develop/testing.md says what a world is.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "tests/explore/coordinator_world.h"
#include "tests/explore/layer_world.h"
#include "tests/explore/search.h"

namespace precondor::explore {
namespace {

constexpr absl::string_view kUsage =
    "usage: explore_test [--world=NAME] [--large] [--max-states=N] [--bug=NAME]\n"
    "  --world       worlds whose name contains this; default: all\n"
    "  --large       the worlds that take an hour, in place of those of CI\n"
    "  --max-states  stop a world here, with exit status 3; default 20,000,000\n"
    "  --bug         plants forgets_rank, forgets_kept, forgets_to_begin, forgets_begin, loses_update, "
    "answers_first, no_fence, forgets_given_up, removes_unknown or removes_first; a failure is then expected\n"
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

// Names: faults, shards.
std::vector<CoordinatorLimits> CoordinatorWorlds(bool large) {
  const std::vector<CoordinatorLimits> worlds = {
      {.name = "coordinator_late_1", .late_calls = 2, .failed_writes = 1},
      {.name = "coordinator_late_2", .shards = 2, .opens = 0, .joins = 0, .late_calls = 2, .failed_writes = 1},
      {.name = "coordinators_two_open", .joins = 0, .late_calls = 1, .takes_over = true},
      {.name = "coordinators_two_join", .opens = 0, .late_calls = 1, .takes_over = true},
      {.name = "coordinators_lost_journal_1", .joins = 0, .late_calls = 1, .takes_over = true, .loses_journal = true},
      {.name = "coordinators_lost_journal_2",
       .shards = 2,
       .opens = 0,
       .joins = 0,
       .late_calls = 1,
       .takes_over = true,
       .loses_journal = true},
  };
  if (!large) return worlds;
  return {{.name = "coordinator_late_2_large", .shards = 2, .late_calls = 1, .failed_writes = 1},
          {.name = "coordinators_two_large", .joins = 0, .late_calls = 2, .failed_writes = 1, .takes_over = true},
          {.name = "coordinators_two_2_large", .shards = 2, .joins = 0, .late_calls = 1, .takes_over = true}};
}

// Returns the bug of that name, or kNone.
template <typename Bug>
Bug FindBug(const std::unordered_map<std::string, Bug>& bugs, absl::string_view name) {
  const auto found = bugs.find(std::string(name));
  return found == bugs.end() ? Bug::kNone : found->second;
}

int Main(int argc, char** argv) {
  const std::unordered_map<std::string, PlantedBug> layer_bugs = {
      {"forgets_rank", PlantedBug::kForgetsRank},        {"forgets_kept", PlantedBug::kForgetsKept},
      {"forgets_to_begin", PlantedBug::kForgetsToBegin}, {"forgets_begin", PlantedBug::kForgetsBegin},
      {"loses_update", PlantedBug::kLosesUpdate},        {"answers_first", PlantedBug::kAnswersFirst}};
  const std::unordered_map<std::string, CoordinatorBug> coordinator_bugs = {
      {"no_fence", CoordinatorBug::kNoFence},
      {"forgets_given_up", CoordinatorBug::kForgetsGivenUp},
      {"removes_unknown", CoordinatorBug::kRemovesUnknown},
      {"removes_first", CoordinatorBug::kRemovesFirst}};
  std::string only;
  bool large = false;
  uint64_t max_states = 20'000'000;
  PlantedBug layer_bug = PlantedBug::kNone;
  CoordinatorBug coordinator_bug = CoordinatorBug::kNone;
  bool bug = false;
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
      layer_bug = FindBug(layer_bugs, argument);
      coordinator_bug = FindBug(coordinator_bugs, argument);
      known = bug = layer_bug != PlantedBug::kNone || coordinator_bug != CoordinatorBug::kNone;
    } else {
      known = false;
    }
    if (known) continue;
    std::fputs(kUsage.data(), stderr);
    return 2;
  }
  int worst = 0;
  const auto search = [&]<typename Explorer>(const typename Explorer::Limits& limits, typename Explorer::Bug planted) {
    if (!absl::StrContains(limits.name, only) || (bug && worst == 1)) return;
    worst = std::max(worst, Search<Explorer>(limits, planted, max_states).Run());
    std::fflush(stdout);
  };
  for (const WorldLimits& limits : Worlds(large)) search.operator()<LayerExplorer>(limits, layer_bug);
  for (const CoordinatorLimits& limits : CoordinatorWorlds(large)) {
    search.operator()<CoordinatorExplorer>(limits, coordinator_bug);
  }
  return bug ? worst != 1 : worst;
}

}  // namespace
}  // namespace precondor::explore

int main(int argc, char** argv) { return precondor::explore::Main(argc, argv); }
