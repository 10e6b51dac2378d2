// SPDX-License-Identifier: Apache-2.0
// Runs many seeds, or one: see --help.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "tests/sim/scenario.h"
#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

constexpr size_t kTraceLines = 120;

constexpr char kUsage[] =
    "usage: sim_test [--first=SEED] [--seeds=COUNT] [--seed=SEED] [--trace=LINES] [--without=PROTECTION]\n"
    "  --trace    lines of what happened that a failure is printed with\n"
    "  --without  switches off dedup, sealing, leases, fencing or checksums; then a failure is what is expected\n";

struct Flags {
  uint64_t first = 1;
  uint64_t seeds = 500;
  uint64_t trace = kTraceLines;
  std::string without;
};

std::optional<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--without=")) {
      flags.without = std::string(argument);
      continue;
    }
    const bool one = absl::ConsumePrefix(&argument, "--seed=");
    uint64_t* value = one || absl::ConsumePrefix(&argument, "--first=") ? &flags.first
                      : absl::ConsumePrefix(&argument, "--seeds=")      ? &flags.seeds
                      : absl::ConsumePrefix(&argument, "--trace=")      ? &flags.trace
                                                                        : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(argument, value)) return std::nullopt;
    if (one) flags.seeds = 1;
  }
  return flags;
}

std::optional<Hooks> HooksFor(const std::string& protection) {
  if (protection.empty()) return Hooks();
  if (protection == "dedup") return Hooks{.core = {.count_repetitions = true}};
  if (protection == "sealing") return Hooks{.core = {.seal_early = true}};
  if (protection == "leases") return Hooks{.core = {.ignore_leases = true}};
  if (protection == "fencing") return Hooks{.core = {.accept_fenced = true}};
  if (protection == "checksums") return Hooks{.verify_checksums = false};
  return std::nullopt;
}

// The failure with what led to it, from a second run that keeps a trace; that it fails alike shows that a run is a
// function of its seed.
void PrintFailure(const Scenario& scenario, const std::string& failure, const Flags& flags) {
  World again(scenario, flags.trace);
  const std::string same = again.Run();
  std::printf("%s\n%s\nfailed: %s\n", Describe(scenario).c_str(), again.trace_tail().c_str(), failure.c_str());
  if (same != failure) std::printf("and differently when run again: %s\n", same.c_str());
  const std::string without = flags.without.empty() ? "" : " --without=" + flags.without;
  std::printf("replay: sim_test --seed=%llu%s\n", static_cast<unsigned long long>(scenario.seed), without.c_str());
}

int RunSeeds(const Flags& flags, const Hooks& hooks) {
  std::printf("seeds %llu ... %llu\n", static_cast<unsigned long long>(flags.first),
              static_cast<unsigned long long>(flags.first + flags.seeds - 1));
  for (uint64_t seed = flags.first; seed < flags.first + flags.seeds; ++seed) {
    const Scenario scenario = MakeScenario(seed, hooks);
    World world(scenario, 0);
    const std::string failure = world.Run();
    if (failure.empty()) continue;
    PrintFailure(scenario, failure, flags);
    std::printf("%llu seeds run\n", static_cast<unsigned long long>(seed - flags.first + 1));
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
  const std::optional<Hooks> hooks = flags.has_value() ? HooksFor(flags->without) : std::nullopt;
  if (!hooks.has_value()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  const int failed = RunSeeds(*flags, *hooks);
  // Without a protection the simulator has to notice.
  return flags->without.empty() ? failed : 1 - failed;
}
