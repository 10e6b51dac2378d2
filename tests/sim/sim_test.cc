// SPDX-License-Identifier: Apache-2.0
// Runs many seeds, or one: see --help.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

#include "tests/sim/found_seeds.h"
#include "tests/sim/scenario.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

constexpr size_t kTraceLines = 120;

constexpr std::pair<absl::string_view, PlantedBug> kBugs[] = {
    {"repetition", PlantedBug::kRepetition}, {"update", PlantedBug::kUpdate}, {"seal", PlantedBug::kSeal},
    {"lease", PlantedBug::kLease},           {"fence", PlantedBug::kFence},   {"checksum", PlantedBug::kChecksum}};

constexpr char kUsage[] =
    "usage: sim_test [--first=SEED] [--seeds=COUNT] [--seed=SEED] [--trace=LINES] [--bug=NAME]\n"
    "       sim_test --found\n"
    "  --show     prints it of runs that do not fail, too\n"
    "  --kinds    draws from so many kinds of faults, the first ones of their table\n"
    "  --found    runs the seeds that have found something\n"
    "  --trace    lines of what happened that a failure is printed with\n"
    "  --bug      plants repetition, update, seal, lease, fence or checksum (scenario.h); then a failure is expected\n";

struct Flags {
  uint64_t first = 1;
  uint64_t seeds = 500;
  uint64_t trace = kTraceLines;
  bool show = false;
  uint64_t kinds = std::numeric_limits<uint64_t>::max();
  bool found = false;
  PlantedBug bug = PlantedBug::kNone;
  std::string bug_name;
};

std::optional<PlantedBug> BugOf(absl::string_view name) {
  for (const auto& [known, bug] : kBugs) {
    if (known == name) return bug;
  }
  return std::nullopt;
}

std::optional<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--bug=")) {
      const std::optional<PlantedBug> bug = BugOf(argument);
      if (!bug.has_value()) return std::nullopt;
      flags.bug = *bug;
      flags.bug_name = std::string(argument);
      continue;
    }
    if (argument == "--found" || argument == "--show") {
      (argument == "--found" ? flags.found : flags.show) = true;
      continue;
    }
    const bool one = absl::ConsumePrefix(&argument, "--seed=");
    uint64_t* value = one || absl::ConsumePrefix(&argument, "--first=") ? &flags.first
                      : absl::ConsumePrefix(&argument, "--seeds=")      ? &flags.seeds
                      : absl::ConsumePrefix(&argument, "--trace=")      ? &flags.trace
                      : absl::ConsumePrefix(&argument, "--kinds=")      ? &flags.kinds
                                                                        : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(argument, value)) return std::nullopt;
    if (one) flags.seeds = 1;
  }
  return flags;
}

// The failure with what led to it, from a second run that keeps a trace; that it fails alike shows that a run is a
// function of its seed.
void PrintFailure(const Scenario& scenario, const std::string& failure, const Flags& flags) {
  World again(scenario, flags.trace);
  const std::string same = again.Run();
  std::printf("%s\n%s\nfailed: %s\n", Describe(scenario).c_str(), again.trace_tail().c_str(), failure.c_str());
  if (same != failure) std::printf("and differently when run again: %s\n", same.c_str());
  const std::string bug = flags.bug_name.empty() ? "" : " --bug=" + flags.bug_name;
  const bool all = flags.kinds == Flags().kinds;
  const std::string kinds = all ? "" : " --kinds=" + std::to_string(flags.kinds);
  std::printf("replay: sim_test --seed=%llu%s%s\n", static_cast<unsigned long long>(scenario.seed), kinds.c_str(),
              bug.c_str());
}

// Whether the seed breaks no invariant.
bool RunSeed(uint64_t seed, const Flags& flags) {
  const Scenario scenario = MakeScenario(seed, flags.bug, flags.kinds);
  World world(scenario, flags.show ? flags.trace : 0);
  const std::string failure = world.Run();
  if (!failure.empty()) {
    PrintFailure(scenario, failure, flags);
  } else if (flags.show) {
    std::printf("%s\n%s\n", Describe(scenario).c_str(), world.trace_tail().c_str());
  }
  return failure.empty();
}

int RunSeeds(const Flags& flags) {
  std::printf("seeds %llu ... %llu\n", static_cast<unsigned long long>(flags.first),
              static_cast<unsigned long long>(flags.first + flags.seeds - 1));
  for (uint64_t seed = flags.first; seed < flags.first + flags.seeds; ++seed) {
    if (RunSeed(seed, flags)) continue;
    const uint64_t run = seed - flags.first + 1;
    std::printf("%llu seeds run\n", static_cast<unsigned long long>(run));
    return 1;
  }
  std::printf("no invariant was broken\n");
  return 0;
}

int RunFoundSeeds(Flags flags) {
  for (const FoundSeed& found : kFoundSeeds) {
    flags.kinds = found.kinds;
    if (RunSeed(found.seed, flags)) continue;
    std::printf("it had found: %s\n", found.what);
    return 1;
  }
  std::printf("no invariant was broken\n");
  return 0;
}

}  // namespace
}  // namespace precondor::sim

int main(int argc, char** argv) {
  using namespace precondor::sim;
  if (argc == 2 && absl::string_view(argv[1]) == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  const std::optional<Flags> flags = ParseFlags(argc, argv);
  if (!flags.has_value()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  const int failed = flags->found ? RunFoundSeeds(*flags) : RunSeeds(*flags);
  // A planted bug has to be noticed.
  return flags->bug == PlantedBug::kNone ? failed : 1 - failed;
}
